"""Converts activations to the types q8 and f16s, once for all products with the same input.

`q8` consists of blocks of 32 int8 codes with a scale and sums (shaders/lib/q8.glsl). Integer dot products
read q8 if the codes of the weights fit int8. `f16s` consists of rows of F16 with a scale
(shaders/lib/half_rows.glsl). Matrix units read f16s and round the weights to F16. Weights above 65,504 are
clipped, and weights below 6e-5 lose precision. Sums are f32.
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
        """Convert x f32 to y q8 [..., k]. In each block of 32, |x - y| <= max |x| / 254. If a block contains
        NaN or inf, every product with the block is NaN."""
        k = y.shape[-1]
        n_rows = rows_of(y, k, "q8")
        assert k % 32 == 0 and rows_of(x, k) == n_rows, (x, y)
        local = 128
        groups = (*self.fold(-(-n_rows * k // (4 * local))), 1)
        push: dict[str, int | float] = {"k": k, "n_rows": n_rows}
        self.record("quantize_q8", "f32", (x, y), push, {"LOCAL": local}, groups, flops=2 * n_rows * k)

    def pack_f16(self, x: View, y: View) -> None:
        """Convert x f32 to y f16s [n_rows, k]. The error |x - y| is at most 2^-11 |x| or 2^-25 times the
        row's largest |x|, whichever is larger. Inf and NaN do not change. In a row with inf or NaN, values
        above 65,520 become inf."""
        k = y.shape[-1]
        n_rows = rows_of(y, k, "f16s")
        assert rows_of(x, k) == n_rows, (x, y)
        push: dict[str, int | float] = {"k": k, "n_rows": n_rows}
        self.record("pack_f16", "f32", (x, y), push, {"LOCAL": 128}, (*self.fold(n_rows), 1))
