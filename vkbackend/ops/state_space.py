"""Ops of state space layers: the scans of Mamba-1 (Gu and Dao 2023, arXiv:2312.00752) and Mamba-2 (Dao and
Gu 2024, arXiv:2405.21060, section 7), and the group norm. If a group is divided over devices, the devices'
sums of squares are added. See recurrent.py for states and runs."""

from __future__ import annotations

from vkbackend.buffer import View
from vkbackend.ops.rows import row_consts
from vkbackend.ops.target import Target, floor_pow2, low_bit, rows_of
from vkbackend.step import MAX_RUNS

MAX_SSM_STATE = 256  # The most values of B or C per head, limited by registers.
# The most values of B per tile, and rows per tile. A tile takes up to 14 KiB of shared memory.
TILE_VALUES, MOST_ROWS = 1024, 8


class StateSpaceOps(Target):
    def ssm_scan(
        self,
        x: View,
        bc: View,
        dt: View,
        bias: View,
        a: View,
        d: View,
        state: View,
        y: View,
        step: View,
        *,
        group: int,
        first: int = 0,
        row_states: bool = False,
    ) -> None:
        """Compute the scan row by row. With t = softplus(dt + bias), the new state is M' = e^(t a) M + t B
        x^T, and y = M'^T C + d x.

        Shapes: x and y [n_rows, n_heads, p], dt [n_rows, n_heads], bias, a and d [n_heads], state f32
        [n_cells, n_heads, n, p]. `a` is at most 0. `bc` [n_rows, 2, n_groups, n] holds B and then C. Head h
        reads group (first + h) / group. Rows of y outside runs are zeros. With `row_states`, each row's cell
        (`Run.states`) gets the state after the row.
        """
        (n_rows, n_heads, p), (n_groups, n) = y.shape, bc.shape[2:]
        assert bc.shape[:2] == (n_rows, 2) and x.dtype == y.dtype == bc.dtype == "f32", (x, bc, y)
        assert rows_of(x, n_heads * p) == rows_of(dt, n_heads) == n_rows, (x, dt, y)
        assert bias.shape == a.shape == d.shape == (n_heads,), (bias, a, d)
        assert state.shape[1:] == (n_heads, n, p) and state.dtype == "f32", (state, y)
        assert (n_heads - 1 + first) // group < n_groups and n % 4 == 0 and n <= MAX_SSM_STATE, (
            bc,
            group,
            first,
        )
        most = 32 if self.limits.is_cpu else 128
        columns = min(low_bit(p), most // 4)
        parts = min(most // columns, low_bit(n // 4))
        self.record(
            "ssm_scan",
            "f32",
            (x, bc, dt, bias, a, d, state, y),
            {"n_heads": n_heads, "n_groups": n_groups, "group": group, "first": first, "n_rows": n_rows},
            {
                "LOCAL": columns * parts,
                "P": p,
                "N": n,
                "COLUMNS": columns,
                "ROWS": max(1, min(MOST_ROWS, TILE_VALUES // n)),
                "ROW_STATES": int(row_states),
            },
            (p // columns, n_heads, min(n_rows, MAX_RUNS)),
            step,
            flops=5 * n_rows * n_heads * n * p,
        )

    def selective_scan(
        self,
        x: View,
        dt: View,
        b: View,
        c: View,
        a: View,
        d: View,
        state: View,
        y: View,
        step: View,
        *,
        row_states: bool = False,
    ) -> None:
        """Compute the scan row by row. With t = softplus(dt), a channel's new state is m' = e^(t a) m + t B
        x, and y = C m' + d x.

        Shapes: x, dt and y [n_rows, width], b and c [n_rows, n], `a` f32 [width, n], d [width], state f32
        [n_cells, width, n]. `a` is at most 0. Rows of y outside runs are zeros. With `row_states`, each row's
        cell (`Run.states`) gets the state after the row.
        """
        (width, n), n_rows = a.shape, rows_of(x, a.shape[0])
        assert rows_of(dt, width) == rows_of(y, width) == rows_of(b, n) == rows_of(c, n) == n_rows, (
            x,
            dt,
            b,
            y,
        )
        assert d.shape == (width,) and a.dtype == state.dtype == "f32", (a, d)
        assert state.shape[1:] == (width, n) and n % 4 == 0 and n <= MAX_SSM_STATE, (state, a)
        # A thread keeps up to 16 values of a state. On a GPU, it keeps 4 if the state is small.
        most, parts = (32, n // 16) if self.limits.is_cpu else (128, max(n // 16, 4))
        parts = min(floor_pow2(parts), low_bit(n // 4))
        columns = most // parts
        self.record(
            "selective_scan",
            "f32",
            (x, dt, b, c, a, d, state, y),
            {"width": width, "n_rows": n_rows},
            {
                "LOCAL": columns * parts,
                "N": n,
                "COLUMNS": columns,
                "ROWS": max(1, min(MOST_ROWS, TILE_VALUES // n)),
                "ROW_STATES": int(row_states),
            },
            (*self.fold(-(-width // columns)), min(n_rows, MAX_RUNS)),
            step,
            flops=7 * n_rows * width * n,
        )

    def group_squares(
        self, z: View | None, x: View, squares: View, *, group: int, first: int = 0, skip: int = 0
    ) -> None:
        """Write the sums of x^2 per group of `group` columns to squares [n_rows, n_groups]. If `z` is given,
        (silu(z) x)^2 replaces x^2. `x` and `z` [n_rows, width] are columns first..first + width of complete
        rows. The first `skip` columns of x are excluded, because another device adds their squares."""
        width, n_groups = x.shape[-1], squares.shape[-1]
        n_rows = rows_of(x, width)
        assert rows_of(squares, n_groups) == n_rows and first + width <= n_groups * group and skip <= width, (
            x,
            squares,
            first,
            group,
        )
        assert z is None or rows_of(z, width) == n_rows, (z, x)
        local, batch = row_consts(self.limits, min(width, group))
        self.record(
            "group_squares",
            "f32",
            (x if z is None else z, x, squares),
            {
                "width": width,
                "first": first,
                "skip": skip,
                "group": group,
                "n_groups": n_groups,
                "n_rows": n_rows,
            },
            {"LOCAL": local, "HAS_Z": int(z is not None), "BATCH": batch},
            (*self.fold(n_rows * n_groups), 1),
            flops=2 * n_rows * width,
        )

    def group_norm(
        self,
        z: View | None,
        x: View,
        squares: View,
        w: View,
        y: View,
        *,
        group: int,
        first: int = 0,
        eps: float,
    ) -> None:
        """Compute y = x / sqrt(squares / group + eps) * w. If `z` is given, silu(z) x replaces x. `squares`
        are the results of group_squares, summed over devices. `w` is [width]. `y` may be `x`."""
        width, n_groups = x.shape[-1], squares.shape[-1]
        n_rows = rows_of(x, width)
        assert rows_of(squares, n_groups) == rows_of(y, width) == n_rows, (x, squares, y)
        assert w.shape == (width,) and w.dtype == "f32", w
        assert first + width <= n_groups * group and (z is None or rows_of(z, width) == n_rows), (
            z,
            x,
            squares,
        )
        local = min(128, floor_pow2(self.limits.max_invocations))
        self.record(
            "group_norm",
            "f32",
            (x if z is None else z, x, squares, w, y),
            {
                "width": width,
                "first": first,
                "group": group,
                "n_groups": n_groups,
                "n_rows": n_rows,
                "eps": eps,
            },
            {"LOCAL": local, "HAS_Z": int(z is not None)},
            (*self.fold(-(-n_rows * width // local)), 1),
            flops=4 * n_rows * width,
        )
