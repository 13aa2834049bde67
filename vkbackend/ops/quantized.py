"""Rounding activations to 8 bits, for products that are dot products of integers.

`quantize_q8` makes rows of type q8 (32 codes, a scale and sums: shaders/lib/q8.glsl) of f32 ones, once for
all the matrices that read them. The weights are those whose codes fit in int8.
"""

from __future__ import annotations

from vkbackend.buffer import View
from vkbackend.limits import Limits
from vkbackend.ops.spec import fold, record, rows_of
from vkbackend.recording import Recording


def quantize_q8(rec: Recording, limits: Limits, x: View, y: View, *, label: str = "") -> None:
    """y q8 [..., k] = x f32 of as many elements: |x - y| is at most half of the largest |x| of 32 / 127.

    32 elements with NaN or inf among them become NaN, in whatever is multiplied with them."""
    k = y.shape[-1]
    n_rows = rows_of(y, k, "q8")
    assert k % 32 == 0 and rows_of(x, k) == n_rows, (x, y)
    local = 128
    groups = (*fold(limits, -(-n_rows * k // (4 * local))), 1)
    push: dict[str, int | float] = {"k": k, "n_rows": n_rows}
    record(
        rec, "quantize_q8", "f32", (x, y), push, {"LOCAL": local}, groups, label=label, flops=2 * n_rows * k
    )
