"""Ops for low-rank adapters (Hu et al. 2021, arXiv:2106.09685). An adapter changes y = W x to y = W x + s B A
x."""

from __future__ import annotations

import math

from vkbackend.buffer import View
from vkbackend.ops.matrix import MAX_VEC_ROWS
from vkbackend.ops.target import Target, rows_of

NO_ADAPTER = 0xFFFFFFFF  # an id without an adapter


class LowRankOps(Target):
    def low_rank_add(
        self,
        b: View,
        t: View,
        ids: View,
        scales: View,
        x: View,
        y: View,
        *,
        n: int,
        y_stride: int | None = None,
        rank: int | None = None,
        t_stride: int | None = None,
        starts: View | None = None,
        n_used: int = 1,
        s_first: int = 0,
        first: int = 0,
        count: int | None = None,
    ) -> None:
        """Compute y[p, i] = x[p, i] + sum over u of scales[p / n_used, s_first + u] * (B_e t[p, u])[i] for
        the adapters e = ids[p, u] and i < n. `y` may be `x`.

        Row p of x and y starts at element p * y_stride. The default stride is the width of y. If y_stride is
        larger than n, x and y are slices of wider rows. In the same way, t is a slice of wider rows if
        t_stride, by default the width of t, is larger than `rank`.

        Shapes: ids u32 [n_rows, n_terms], t [n_rows, n_terms, rank], scales f32 [n_rows / n_used, any]. `b`
        contains floats of any type.

        Without `starts`, b is [n, n_adapters * rank], and B_e is columns e * rank to (e + 1) * rank. An id of
        n_adapters or more adds nothing.

        With `starts`, the u32 prefix sums of the number of rows per id, b is [rows, rank], and B_e is rows
        starts[e] to starts[e + 1], at most n. If a stack exceeds one binding, each dispatch gets the ids
        first..first + count and leaves other rows of y unchanged. Then n_terms is 1 and `y` is `x`.
        """
        n_terms = 1 if starts else ids.shape[-1]
        n_rows, rank = math.prod(ids.shape) // n_terms, t.shape[-1] if rank is None else rank
        t_stride = rank if t_stride is None else t_stride
        y_stride, per_row = y.shape[-1] if y_stride is None else y_stride, scales.shape[-1]
        known = starts.shape[0] - 1 if starts else b.shape[1] // rank
        count = known - first if count is None else count
        assert ids.dtype == "u32" and rank <= t_stride, (ids, t)
        assert rows_of(t, 1) >= (n_rows * n_terms - 1) * t_stride + rank, (t, ids, t_stride)
        assert b.dtype in ("f32", "f16", "bf16") and 0 <= first < first + count <= known, (b, first, count)
        least = (n_rows - 1) * y_stride + n
        assert min(rows_of(x, 1), rows_of(y, 1)) >= least and n <= y_stride, (x, y, n, y_stride)
        assert n_rows % n_used == 0 and rows_of(scales, per_row) >= n_rows // n_used, (scales, n_rows)
        assert s_first + n_terms <= per_row, (scales, s_first, n_terms)
        assert b.nbytes <= self.limits.max_storage_range, f"{b!r} exceeds one binding"
        if starts:
            assert starts.dtype == "u32" and x == y and b.shape[1] == rank, (b, starts, t)
        else:
            assert b.shape == (n, known * rank) and first == 0, (b, t, n)
        local = 32 if self.limits.is_cpu else 64
        invariant = self.limits.batch_invariant and n_rows <= MAX_VEC_ROWS
        tile = 1 if n_rows == 1 or invariant else 4
        self.record(
            "low_rank_add",
            b.dtype,
            (b, t, ids, scales, starts or ids, x, y),
            {
                "n": n,
                "y_stride": y_stride,
                "w_stride": b.shape[1],
                "rank": rank,
                "t_stride": t_stride,
                "n_rows": n_rows,
                "n_used": n_used,
                "n_terms": n_terms,
                "s_stride": per_row,
                "s_first": s_first,
                "first": first,
                "count": count,
            },
            {"LOCAL": local, "N": tile, "STACKED": int(starts is not None)},
            (*self.fold(-(-n // local)), -(-n_rows // tile)),
            flops=2 * n_rows * n_terms * rank * n,
        )

    def adapter_experts(self, adapters: View, experts: View, ids: View, *, term: int, n_experts: int) -> None:
        """Set ids[r, k] to adapters[r, term] * n_experts + experts[r, k], or to NO_ADAPTER if row r has no
        such adapter. Shapes: adapters u32 [n_rows, n_terms], experts and ids u32 [n_rows, n_used]."""
        (n_rows, n_used), n_terms = experts.shape, adapters.shape[-1]
        assert ids.shape == experts.shape and adapters.shape == (n_rows, n_terms), (adapters, experts, ids)
        assert {view.dtype for view in (adapters, experts, ids)} == {"u32"} and term < n_terms, term
        self.record(
            "adapter_experts",
            "f32",
            (adapters, experts, ids),
            {"n_rows": n_rows, "n_used": n_used, "n_terms": n_terms, "term": term, "n_experts": n_experts},
            {"LOCAL": 64},
            (*self.fold(-(-n_rows * n_used // 64)), 1),
        )
