"""Ops of recurrent layers: short convolutions and the gated delta net (Yang, Kautz, Hatamizadeh 2025,
arXiv:2412.06464). Kimi Linear (arXiv:2510.26692) has gates per channel.

Recurrent states are in cells [n_cells, ...]. `Run.states` holds the cells that a run reads and writes, which
may be equal. A run at position 0 reads no cell and begins with zeros.
"""

from __future__ import annotations

import math
from typing import Required, TypedDict, Unpack

from vkbackend.buffer import View
from vkbackend.ops.target import Target, floor_pow2, rows_of
from vkbackend.step import MAX_RUNS

CONV_TILE = 16  # Rows per workgroup of ssm_conv.
MAX_DELTA_HEAD = 128  # Limited by the shared memory of delta_chunk and delta_scan.
CHUNK, CHUNK_KDA = 64, 16  # Rows per chunk: 64 with gates per head, 16 with gates per channel.


def tiles(n_rows: int, size: int) -> int:
    """Return an upper bound for the number of tiles. The last tile of each run may be incomplete."""
    return min(n_rows, n_rows // size + min(n_rows, MAX_RUNS))


class DeltaKeywords(TypedDict, total=False):
    """Keywords that `delta_net` explains."""

    n_k: Required[int]
    tiled: bool
    q_stride: int | None
    v_stride: int | None


def _delta_push(
    q: View,
    k: View,
    v: View,
    g: View,
    beta: View,
    y: View,
    *,
    n_k: int,
    tiled: bool = False,
    q_stride: int | None = None,
    v_stride: int | None = None,
) -> tuple[dict[str, int | float], int, bool]:
    n_rows, n_heads, size = y.shape
    q_stride = n_k * size if q_stride is None else q_stride
    v_stride = n_heads * size if v_stride is None else v_stride
    kda = g.shape[-1] == size
    assert n_heads % n_k == 0 and size % 16 == 0 and size <= MAX_DELTA_HEAD, (n_k, y)
    assert g.shape == (n_rows, n_heads, size if kda else 1) and rows_of(beta, n_heads) == n_rows, (g, beta)
    for view, stride, n in ((q, q_stride, n_k), (k, q_stride, n_k), (v, v_stride, n_heads)):
        assert math.prod(view.shape) >= (n_rows - 1) * stride + n * size and view.dtype == "f32", (
            view,
            stride,
        )
    push: dict[str, int | float] = {
        "n_heads": n_heads,
        "n_k": n_k,
        "tiled": int(tiled),
        "q_stride": q_stride,
        "v_stride": v_stride,
        "n_rows": n_rows,
        "scale": size**-0.5,
    }
    return push, size, kda


def delta_work(n_rows: int, n_heads: int, size: int, kda: bool) -> tuple[int, int, int]:
    """Return the shape of delta_chunk's argument `work`."""
    return n_rows, n_heads, 5 * size + (CHUNK_KDA if kda else CHUNK)


class RecurrentOps(Target):
    def ssm_conv(
        self,
        x: View,
        w: View,
        b: View | None,
        state: View,
        y: View,
        step: View,
        *,
        silu: bool = True,
        row_states: bool = False,
    ) -> None:
        """Compute y[t, c] = silu(b[c] + sum over j of w[c, j] * x[t - (d_conv - 1) + j, c]) within each run.
        Rows before the run come from the state, which then gets the run's last rows. Without `silu`, y is the
        sum. With `row_states`, runs have at most CONV_TILE rows, and each row's cell (`Run.states`) gets the
        state after the row.

        Shapes: x and y [n_rows, width], w f32 [width, d_conv], b [width] or None, state f32 [n_cells, width,
        d_conv - 1]. The state stores the oldest row first. Rows of y outside runs are not written.
        """
        width, d_conv = w.shape
        n_rows = rows_of(x, width)
        assert w.dtype == state.dtype == "f32" and rows_of(y, width) == n_rows and d_conv >= 2, (x, w, y)
        assert state.shape[1:] == (width, d_conv - 1), (w, state)
        assert b is None or (b.shape == (width,) and b.dtype == "f32"), b
        local = 64
        self.record(
            "ssm_conv",
            "f32",
            (x, w, w if b is None else b, state, y),
            {"width": width, "n_rows": n_rows},
            {
                "LOCAL": local,
                "D_CONV": d_conv,
                "SILU": int(silu),
                "HAS_B": int(b is not None),
                "ROW_STATES": int(row_states),
            },
            (*self.fold(-(-width // local)), tiles(n_rows, CONV_TILE)),
            step,
            flops=2 * n_rows * width * d_conv,
        )

    def l2_norm(self, x: View, y: View, *, eps: float, x_stride: int | None = None) -> None:
        """Compute y = x / sqrt(sum(x^2) + eps) per head. `y` is [n_rows, n_heads, n]. Rows of x begin at
        multiples of x_stride."""
        n_rows, n_heads, n = y.shape
        x_stride = n_heads * n if x_stride is None else x_stride
        assert x.dtype == y.dtype == "f32" and x_stride >= n_heads * n, (x, y)
        assert math.prod(x.shape) >= (n_rows - 1) * x_stride + n_heads * n, (x, y, x_stride)
        self.record(
            "l2_norm",
            "f32",
            (x, y),
            {"n": n, "n_heads": n_heads, "x_stride": x_stride, "n_rows": n_rows, "eps": eps},
            {"LOCAL": 32},
            (*self.fold(n_rows * n_heads), 1),
            flops=3 * n_rows * n_heads * n,
        )

    def delta_gates(
        self, a: View, dt: View, decay: View, b: View, g: View, beta: View, *, bound: float = 0.0
    ) -> None:
        """Compute the gates g = softplus(a + dt) * decay and beta = sigmoid(b) of delta_net. The state is
        multiplied by e^g, and beta scales its update. With decay <= 0, g <= 0. With `bound` < 0,
        g = bound * sigmoid(|decay| * (a + dt)), which is above `bound`.

        Shapes: b and beta [n_rows, n_heads], a and g [n_rows, n_heads * width], dt [n_heads * width], decay
        [n_heads]. With one gate per head, the width is 1. With one gate per key channel, the width is the
        head size.
        """
        n_heads = decay.shape[0]
        width = dt.shape[0] // n_heads
        n_rows = rows_of(b, n_heads)
        assert dt.shape == (n_heads * width,) and rows_of(beta, n_heads) == n_rows, (dt, decay, beta)
        assert rows_of(a, n_heads * width) == rows_of(g, n_heads * width) == n_rows, (a, g)
        self.record(
            "delta_gates",
            "f32",
            (a, dt, decay, b, g, beta),
            {"n_heads": n_heads, "width": width, "n_rows": n_rows, "bound": bound},
            {"LOCAL": 64, "BOUNDED": int(bound < 0)},
            (*self.fold(-(-n_rows * n_heads * width // 64)), 1),
            flops=8 * n_rows * n_heads * width,
        )

    def delta_net(
        self,
        q: View,
        k: View,
        v: View,
        g: View,
        beta: View,
        state: View,
        y: View,
        step: View,
        *,
        row_states: bool = False,
        **rows: Unpack[DeltaKeywords],
    ) -> None:
        """Compute the gated delta rule row by row. With the state M and N = e^g M, the new state is M' = N +
        k (beta (v - N^T k))^T, and y = M'^T q / sqrt(s).

        Shapes: y and v [n_rows, n_heads, s], q and k [n_rows, n_k, s], g [n_rows, n_heads, 1 or s], beta
        [n_rows, n_heads]. `state` f32 [n_cells, n_heads, s, s] is indexed by key, then by value. `g` is at
        most 0. Rows of q and k begin at multiples of q_stride, and rows of v at multiples of v_stride. Head h
        reads key head h / (n_heads / n_k), or h % n_k with `tiled`. Rows of y outside runs are zeros.
        With `row_states`, each row's cell (`Run.states`) gets the state after the row.
        """
        push, size, kda = _delta_push(q, k, v, g, beta, y, **rows)
        n_rows, n_heads = y.shape[:2]
        assert state.shape[1:] == (n_heads, size, size) and state.dtype == "f32", (state, y)
        local = min(floor_pow2(size & -size), 32)
        assert size % local == 0, (size, local)  # the shader has no bounds check
        self.record(
            "delta_net",
            "f32",
            (q, k, v, g, beta, state, y),
            push,
            {"LOCAL": local, "S": size, "KDA": int(kda), "ROW_STATES": int(row_states)},
            (size // local, n_heads, n_rows),
            step,
            flops=8 * n_rows * n_heads * size * size,
        )

    def delta_chunk(
        self,
        q: View,
        k: View,
        v: View,
        g: View,
        beta: View,
        work: View,
        step: View,
        **rows: Unpack[DeltaKeywords],
    ) -> None:
        """Compute, for all chunks in parallel, the intermediate results of delta_net that do not depend on
        the state."""
        n_rows, n_heads = work.shape[:2]
        kda = g.shape[-1] > 1
        size = (work.shape[2] - (CHUNK_KDA if kda else CHUNK)) // 5
        y = View(work.buffer, work.offset, (n_rows, n_heads, size))
        push, size, kda = _delta_push(q, k, v, g, beta, y, **rows)
        assert work.shape == delta_work(n_rows, n_heads, size, kda), (work, v)
        chunk = CHUNK_KDA if kda else CHUNK
        self.record(
            "delta_chunk",
            "f32",
            (q, k, v, g, beta, work),
            push,
            {"LOCAL": 32 if self.limits.is_cpu else 128, "S": size, "KDA": int(kda), "C": chunk},
            (tiles(n_rows, chunk), n_heads, 1),
            step,
            flops=2 * n_rows * n_heads * size * 2 * chunk,
        )

    def delta_scan(self, work: View, state: View, y: View, step: View) -> None:
        """Compute y and the new state of delta_net from the result `work` of delta_chunk."""
        n_rows, n_heads, size = y.shape
        chunk = work.shape[2] - 5 * size
        assert work.shape[:2] == (n_rows, n_heads) and chunk in (CHUNK, CHUNK_KDA), (work, y)
        assert state.shape[1:] == (n_heads, size, size) and state.dtype == "f32", (state, y)
        self.record(
            "delta_scan",
            "f32",
            (work, state, y),
            {"n_heads": n_heads, "n_rows": n_rows},
            {"LOCAL": 32 if self.limits.is_cpu else 128, "S": size, "C": chunk},
            (size // 16, n_heads, min(n_rows, MAX_RUNS)),
            step,
            flops=2 * n_rows * n_heads * size * (3 * size + chunk),
        )
