"""Converts activations to the types that products read, once for all matrices that share them.

q8 (32 codes, a scale and sums: shaders/lib/q8.glsl) is for integer dot products with weights whose codes fit
int8. f16s (F16 with a scale: shaders/lib/half_rows.glsl) is for matrix units, which also round weights to
F16: above 65,504 they are clipped, below 6e-5 they lose digits. Sums are f32.
"""

from __future__ import annotations

from vkbackend.buffer import View
from vkbackend.ops.target import Target, rows_of


class OperandOps(Target):
    def convert(self, x: View, y: View) -> None:
        if y.dtype == "q8":
            self.quantize_q8(x, y)
        else:
            self.pack_f16(x, y)

    def quantize_q8(self, x: View, y: View) -> None:
        """y q8 [..., k] = x f32. In each block of 32, |x - y| <= max |x| / 254. If a block has NaN or inf,
        every product with the block is NaN."""
        k = y.shape[-1]
        n_rows = rows_of(y, k, "q8")
        assert k % 32 == 0 and rows_of(x, k) == n_rows, (x, y)
        local = 128
        groups = (*self.fold(-(-n_rows * k // (4 * local))), 1)
        push: dict[str, int | float] = {"k": k, "n_rows": n_rows}
        self.record("quantize_q8", "f32", (x, y), push, {"LOCAL": local}, groups, flops=2 * n_rows * k)

    def pack_f16(self, x: View, y: View) -> None:
        """y f16s [n_rows, k] = x f32. |x - y| is at most 2^-11 of |x|, or 2^-25 of the row's largest |x| if
        that is more. Inf and NaN are kept; in a row with inf or NaN, values above 65,520 become inf."""
        k = y.shape[-1]
        n_rows = rows_of(y, k, "f16s")
        assert rows_of(x, k) == n_rows, (x, y)
        push: dict[str, int | float] = {"k": k, "n_rows": n_rows}
        self.record("pack_f16", "f32", (x, y), push, {"LOCAL": 128}, (*self.fold(n_rows), 1))
