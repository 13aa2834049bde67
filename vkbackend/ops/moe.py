"""The ops of a mixture of experts.

The order is moe_logits and moe_topk on the residual, moe_group, mat_id (choice.py) with gate and up, glu,
mat_id with down, moe_sum; add_id adds biases of experts behind a mat_id. A device holds some columns of every
expert's feed-forward network, of each as many as its plan says: `starts` u32 [n_experts + 1] are the prefix
sums of those counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vkbackend.buffer import View
from vkbackend.ops.experts import Groups, tile_count
from vkbackend.ops.target import Target, rows_of

MAX_EXPERTS, MAX_USED, MAX_GROUPS = 1024, 32, 64  # what moe_topk has shared memory for
GATINGS = ("softmax", "sigmoid", "softmax_weight")  # as numbered in shaders/moe_topk.comp
LOGITS_LOCAL = 32  # part of the order of summation, so never chosen by device


@dataclass(frozen=True, slots=True)
class Gating:
    """How experts are chosen and weighted, given logits l = logit_scale * (router * norm of h) + bias.

    The probabilities are the softmax of l over all experts, or sigmoid(l), or l itself (softmax_weight: the
    weights are the softmax of l over the chosen experts). The experts with the largest probability + `select`
    are chosen; `select` has no part in the weights. With groups, only experts of the best n_group_used groups
    may be chosen: those whose two best experts have the largest sums. With norm_w the weights are divided by
    max(their sum, 2^-14). Then they are multiplied by `scale`.
    """

    kind: str = "softmax"  # one of GATINGS
    norm_w: bool = True
    scale: float = 1.0
    n_group: int = 1
    n_group_used: int = 1
    logit_scale: float = 1.0  # above 0


class MoeOps(Target):
    """Routing, grouping, and what joins the experts' results."""

    def moe_logits(self, h: View, w_norm: View, w: View, logits: View) -> None:
        """logits[r, e] = sum over k of h[r, k] * (w_norm[k] * w[e, k]), the same bits on every device.

        h [n_rows, n_embd] is the residual before its norm, whose weight is w_norm [n_embd]; w f32
        [n_experts, n_embd]; logits [n_rows, n_experts] are too large by rms(h), which changes no order.
        """
        n_experts, n_embd = w.shape
        n_rows = rows_of(h, n_embd)
        assert w.dtype == "f32" and w_norm.shape == (n_embd,) and w_norm.dtype == "f32", (w, w_norm)
        assert w.nbytes <= self.limits.max_storage_range and rows_of(logits, n_experts) == n_rows, (w, logits)
        n = 1 if n_rows == 1 else 4  # rows per workgroup; not part of the order
        self.record(
            "moe_logits",
            "f32",
            (h, w_norm, w, logits),
            {"n_embd": n_embd, "n_experts": n_experts, "n_rows": n_rows},
            {"LOCAL": LOGITS_LOCAL, "N": n},
            (*self.fold(n_experts), -(-n_rows // n)),
            flops=3 * n_rows * n_experts * n_embd,
        )

    def moe_topk(
        self,
        logits: View,
        h: View,
        ids: View,
        weights: View,
        gating: Gating,
        *,
        eps: float,
        bias: View | None = None,
        select: View | None = None,
        gain: View | None = None,
    ) -> None:
        """ids u32 [n_rows, n_used]: the chosen experts, best first, ties by lower id, NaN last; weights f32.

        logits [n_rows, n_experts] are moe_logits of h [n_rows, n_embd], the residual, before its norm with
        eps. f32 [n_experts] each: `bias` of the router, `select` (see Gating), `gain`, which multiplies an
        expert's weight. Equal bits on every device and driver.
        """
        n_rows, n_used = ids.shape
        n_embd, n_experts, g = h.shape[-1], logits.shape[-1], gating
        assert ids.dtype == "u32" and rows_of(weights, n_used) == n_rows, (ids, weights)
        assert rows_of(h, n_embd) == n_rows and rows_of(logits, n_experts) == n_rows, (h, logits, ids)
        assert 1 <= n_used <= min(n_experts, MAX_USED) and n_experts <= MAX_EXPERTS, (n_used, n_experts)
        assert all(v is None or (v.shape == (n_experts,) and v.dtype == "f32") for v in (bias, select, gain))
        assert 1 <= g.n_group_used <= g.n_group <= MAX_GROUPS and n_experts % g.n_group == 0, g
        assert g.n_group == 1 or n_experts // g.n_group >= 2, g
        self.record(
            "moe_topk",
            "f32",
            (logits, h, bias or logits, select or logits, gain or logits, ids, weights),
            {
                "n_embd": n_embd,
                "n_experts": n_experts,
                "n_used": n_used,
                "n_rows": n_rows,
                "n_groups": g.n_group,
                "n_groups_used": g.n_group_used,
                "norm_w": int(g.norm_w),
                "eps": eps,
                "scale": g.scale,
                "logit_scale": g.logit_scale,
            },
            {
                "LOCAL": 32 if self.limits.is_cpu or n_experts <= 32 else 128,
                "GATING": GATINGS.index(g.kind),
                "HAS_BIAS": int(bias is not None),
                "HAS_SELECT": int(select is not None),
                "HAS_GAIN": int(gain is not None),
            },
            (*self.fold(n_rows), 1),
            flops=n_rows * (2 * n_embd + n_experts * n_experts),
        )

    def moe_group(self, ids: View, groups: Groups, *, n_experts: int) -> None:
        """Sort the pairs of `ids` u32 [n_rows, n_used] by expert, into the arrays of `groups`."""
        n_pairs, n_tiles = ids.shape[0] * ids.shape[1], groups.tiles.shape[0]
        assert ids.dtype == groups.order.dtype == groups.tiles.dtype == "u32", (ids, groups)
        assert groups.order.shape == (n_pairs,) and groups.tiles.shape == (n_tiles, 3), (ids, groups)
        assert n_tiles >= tile_count(n_pairs, n_experts, groups.tile), (n_tiles, n_pairs, n_experts)
        push: dict[str, int | float] = {"n_pairs": n_pairs, "n_experts": n_experts}
        push |= {"tile": groups.tile, "n_tiles": n_tiles}
        args = ids, groups.order, groups.tiles
        self.record("moe_group", "f32", args, push, {"LOCAL": 128}, (1, 1, 1))

    def add_id(self, x: View, b: View, ids: View, y: View, *, starts: View | None = None) -> None:
        """y[r, u] = x[r, u] + b[ids[r, u]] for x [n_rows, n_used, n], b f32 [n_experts, n]; y may be x.

        With `starts`, as in experts.py, the biases of expert e are elements starts[e]..starts[e + 1] of b, at
        most n, and only so many elements of y[r, u] are written.
        """
        n, n_pairs = x.shape[-1], math.prod(ids.shape)
        assert rows_of(x, n) == rows_of(y, n) == n_pairs and ids.dtype == "u32" and b.dtype == "f32", (
            x,
            ids,
            b,
        )
        assert (starts.dtype == "u32") if starts else rows_of(b, n), (b, starts)
        assert n_pairs <= self.limits.max_groups[2], f"{n_pairs} pairs exceed the grid"
        self.record(
            "add_id",
            "f32",
            (x, b, ids, starts or ids, y),
            {"n": n, "n_pairs": n_pairs},
            {"LOCAL": 64, "RAGGED": int(starts is not None)},
            (*self.fold(-(-n // 64)), n_pairs),
            flops=n * n_pairs,
        )

    def moe_sum(self, x: View, weights: View, y: View) -> None:
        """y[r] = sum over u, in order, of weights[r, u] * x[r, u]; x [n_rows, n_used, n], y [n_rows, n]."""
        n_rows, n_used, n = x.shape
        assert rows_of(weights, n_used) == rows_of(y, n) == n_rows and x.dtype == "f32", (x, weights, y)
        self.record(
            "moe_sum",
            "f32",
            (x, weights, y),
            {"n": n, "n_used": n_used, "n_rows": n_rows},
            {"LOCAL": 128},
            (*self.fold(-(-n // 128)), n_rows),
            flops=2 * math.prod(x.shape),
        )
