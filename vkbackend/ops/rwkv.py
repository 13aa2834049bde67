"""Ops of RWKV-7 (Peng et al. 2025, arXiv:2503.14456). Heads have `size` values. See recurrent.py for states
and runs."""

from __future__ import annotations

from vkbackend.buffer import View
from vkbackend.ops.recurrent import CONV_TILE, tiles
from vkbackend.ops.target import Target, floor_pow2, low_bit, rows_of
from vkbackend.step import MAX_RUNS

MAX_WKV_HEAD = 128  # limited by registers
ROW_VALUES, MOST_ROWS = 512, 8  # values of a vector per tile in shared memory, and rows


class RwkvOps(Target):
    def token_shift(
        self, x: View, mu: View, state: View, y: View, step: View, *, row_states: bool = False
    ) -> None:
        """Compute y[s] = x + mu[s] (before - x), where `before` is the row before each row of x. Rows before
        a run come from the state, which then gets the run's last row. With `row_states`, runs have at most
        CONV_TILE rows, and each row's cell (`Run.states`) gets the row.

        Shapes: x [n_rows, width], mu f32 [n, width], state f32 [n_cells, width], y [n, n_rows, width]. Rows
        of y outside runs are not written.
        """
        (n, width), n_rows = mu.shape, rows_of(x, mu.shape[1])
        assert y.shape == (n, n_rows, width) and state.shape[1:] == (width,), (x, mu, state, y)
        assert mu.dtype == state.dtype == y.dtype == "f32", (mu, state, y)
        local = 64
        self.record(
            "token_shift",
            "f32",
            (x, mu, state, y),
            {"width": width, "n_rows": n_rows},
            {"LOCAL": local, "MIXES": n, "ROW_STATES": int(row_states)},
            (*self.fold(-(-width // local)), tiles(n_rows, CONV_TILE)),
            step,
            flops=3 * n * n_rows * width,
        )

    def wkv_keys(
        self,
        k: View,
        rate: View,
        removal: View,
        replacement: View,
        key: View,
        removed: View,
        added: View,
    ) -> None:
        """With a = sigmoid(rate), compute removed = k removal / |k removal| per head, added = removed a and
        key = k (1 + (a - 1) replacement).

        Shapes: k, rate, key, removed and added [n_rows, n_heads, size], removal and replacement [n_heads *
        size].
        """
        n_rows, n_heads, size = key.shape
        for view in (k, rate, removed, added):
            assert rows_of(view, n_heads * size) == n_rows, (view, key)
        assert removal.shape == replacement.shape == (n_heads * size,), (removal, replacement)
        self.record(
            "wkv_keys",
            "f32",
            (k, rate, removal, replacement, key, removed, added),
            {"size": size, "n_heads": n_heads, "n_rows": n_rows},
            {"LOCAL": 32},
            (*self.fold(n_rows * n_heads), 1),
            flops=14 * n_rows * n_heads * size,
        )

    def wkv(
        self,
        r: View,
        decay: View,
        key: View,
        v: View,
        removed: View,
        added: View,
        state: View,
        y: View,
        step: View,
        *,
        row_states: bool = False,
    ) -> None:
        """Compute the scan row by row. With the state M and w = exp(-e^(-1/2) sigmoid(decay)), the new state
        is M' = diag(w) M - added (M^T removed)^T + key v^T, and y = M'^T r.

        Shapes: all but the state [n_rows, n_heads, size]. `state` f32 [n_cells, n_heads, size, size] is
        indexed by key, then by value. Rows of y outside runs are zeros. With `row_states`, each row's cell
        (`Run.states`) gets the state after the row.
        """
        n_rows, n_heads, size = y.shape
        for view in (r, decay, key, v, removed, added):
            assert rows_of(view, n_heads * size) == n_rows, (view, y)
        assert state.shape[1:] == (n_heads, size, size) and state.dtype == "f32", (state, y)
        assert size % 4 == 0 and size <= MAX_WKV_HEAD, y
        parts = min(floor_pow2(max(size // 16, 1)), low_bit(size // 4))  # of up to 16 values per thread
        columns = min(low_bit(size), (32 if self.limits.is_cpu else 128) // parts)
        self.record(
            "wkv",
            "f32",
            (r, decay, key, v, removed, added, state, y),
            {"n_heads": n_heads, "n_rows": n_rows},
            {
                "LOCAL": columns * parts,
                "S": size,
                "COLUMNS": columns,
                "ROWS": max(1, min(MOST_ROWS, ROW_VALUES // size)),
                "ROW_STATES": int(row_states),
            },
            (size // columns, n_heads, min(n_rows, MAX_RUNS)),
            step,
            flops=8 * n_rows * n_heads * size * size,
        )

    def wkv_norm(
        self, x: View, r: View, key: View, v: View, bonus: View, w: View, b: View, y: View, *, eps: float
    ) -> None:
        """Compute y = (x - mean(x)) / sqrt(var(x) + eps) * w + b + v sum(r key bonus) per head.

        Shapes: x, r, key, v and y [n_rows, n_heads, size], bonus, w and b [n_heads * size].
        """
        n_rows, n_heads, size = y.shape
        for view in (x, r, key, v):
            assert rows_of(view, n_heads * size) == n_rows, (view, y)
        assert bonus.shape == w.shape == b.shape == (n_heads * size,), (bonus, w, b)
        self.record(
            "wkv_norm",
            "f32",
            (x, r, key, v, bonus, w, b, y),
            {"size": size, "n_heads": n_heads, "n_rows": n_rows, "eps": eps},
            {"LOCAL": 32},
            (*self.fold(n_rows * n_heads), 1),
            flops=12 * n_rows * n_heads * size,
        )
