"""Ops of latent attention, MLA (DeepSeek-AI 2024, arXiv:2405.04434)."""

from __future__ import annotations

from vkbackend.buffer import View
from vkbackend.ops.target import Target, floor_pow2, rows_of


class HeadOps(Target):
    def mat_heads(self, w: View, x: View, y: View, *, n_heads: int) -> None:
        """Compute y[r, h, i] = sum over k of w[h, i, k] * x[r, h, k]. Shapes: w [n_heads * n, k] of any
        weight type, x [n_rows, n_heads, k], y [n_rows, n_heads, n]."""
        k, n = w.shape[1], w.shape[0] // n_heads
        n_rows = rows_of(x, n_heads * k)
        assert w.shape[0] == n_heads * n and rows_of(y, n_heads * n) == n_rows, (w, x, y)
        assert w.nbytes <= self.limits.max_storage_range, f"{w!r} exceeds one binding: split it by rows"
        local = 32 if self.limits.is_cpu else 128
        tpr = 1 if self.limits.is_cpu else min(32, max(4, floor_pow2(k // 8)))
        tile = 1 if n_rows == 1 else 4
        self.record(
            "mat_heads",
            w.dtype,
            (w, x, y),
            {"k": k, "n": n, "n_heads": n_heads, "n_rows": n_rows},
            {"LOCAL": local, "TPR": tpr, "N": tile},
            (*self.fold(-(-n_heads * n // (local // tpr))), -(-n_rows // tile)),
            flops=2 * n_rows * n_heads * n * k,
        )

    def concat(self, a: View, b: View, y: View) -> None:
        """Concatenate row i of `a` [n, n_a] and row i // times of `b` [n / times, n_b] to row i of y [n, n_a
        + n_b]."""
        (n_rows, n_a), (n_b_rows, n_b) = a.shape, b.shape
        assert a.dtype == b.dtype == "f32" and n_rows % n_b_rows == 0, (a, b)
        assert rows_of(y, n_a + n_b) == n_rows, (a, b, y)
        self.record(
            "concat",
            "f32",
            (a, b, y),
            {"n_a": n_a, "n_b": n_b, "n_rows": n_rows, "times": n_rows // n_b_rows},
            {"LOCAL": 64},
            (*self.fold(-(-n_rows * (n_a + n_b) // 64)), 1),
        )
