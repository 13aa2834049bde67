"""Ops of a mixture of experts.

A layer records moe_logits, moe_topk, moe_group, mat_id for gate and up, glu, mat_id for down, and moe_sum.
If experts have biases, an add_id follows each mat_id. See experts.py for `starts`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vkbackend.buffer import View
from vkbackend.ops.experts import Groups, tile_count
from vkbackend.ops.target import Target, rows_of

MAX_EXPERTS, MAX_USED, MAX_GROUPS = 1024, 32, 64  # Limited by the shared memory of moe_topk.
UNNORMED = -1.0  # A value of moe_topk's `eps`: the router reads the residual without a norm.
# In the order of shaders/moe_topk.comp.
GATINGS = ("softmax", "sigmoid", "softmax_weight", "sparse_mixer", "root_softplus")
LOGITS_LOCAL = 32  # Fixed, so that every device adds in the same order.


@dataclass(frozen=True, slots=True)
class Gating:
    """Routing of a row to experts. The logits are l = logit_scale * (router * norm of h) + bias.

    Probabilities are softmax(l), sigmoid(l) or, if `root_softplus`, sqrt(ln(1 + e^l)). If `softmax_weight`,
    probabilities are l, and weights are the softmax over the chosen experts' l. If `sparse_mixer`,
    probabilities are l, too. The weight of a chosen expert with the logit m is then its softmax over the
    experts that were not chosen before it and have m - l <= 0.02 max(|l|, m) (Liu et al. 2024,
    arXiv:2409.12136). Experts with the largest probability + `select` are chosen. `select` does not change
    the weights. If experts have groups, only experts of the n_group_used best groups are chosen. A group's
    score is the sum of its two best experts. `norm_w` divides the weights by max(their sum, 2^-14), except
    for `sparse_mixer`. `scale` then multiplies the weights. The id of expert e is e // per_id.
    """

    kind: str = "softmax"
    norm_w: bool = True
    scale: float = 1.0
    n_group: int = 1
    n_group_used: int = 1
    logit_scale: float = 1.0  # above 0
    per_id: int = 1  # consecutive experts that share an id
    softcap: float = 0.0  # the c of c tanh(l / c), which replaces l, or 0


class MoeOps(Target):
    def moe_logits(self, h: View, w_norm: View, w: View, logits: View) -> None:
        """Compute logits[r, e] = sum over k of h[r, k] * (w_norm[k] * w[e, k]), with identical bits on every
        device.

        `h` [n_rows, n_embd] is the residual before the RMS norm with weight w_norm [n_embd]. `w` is f32
        [n_experts, n_embd]. `logits` [n_rows, n_experts] are not divided by rms(h), because this does not
        change their order.
        """
        n_experts, n_embd = w.shape
        n_rows = rows_of(h, n_embd)
        assert w.dtype == "f32" and w_norm.shape == (n_embd,) and w_norm.dtype == "f32", (w, w_norm)
        assert w.nbytes <= self.limits.max_storage_range and rows_of(logits, n_experts) == n_rows, (w, logits)
        n = 1 if n_rows == 1 else 4  # rows per workgroup
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
        given: View | None = None,
    ) -> None:
        """Write the chosen experts to `ids` u32 [n_rows, n_used], best first, and their weights to `weights`
        f32. Of equal probabilities, the lower id is first. NaN is last.

        `logits` [n_rows, n_experts] are moe_logits of `h`. The router's `bias`, `select` and `gain` are f32
        [n_experts]. `gain` multiplies the weights. An `eps` of UNNORMED means that the router reads `h`
        without a norm. The bits are identical on every device and driver. If `given` f32 [n_rows, n_used] is
        set, it contains the ids of the chosen experts in order.
        """
        n_rows, n_used = ids.shape
        n_embd, n_experts, g = h.shape[-1], logits.shape[-1], gating
        assert ids.dtype == "u32" and rows_of(weights, n_used) == n_rows, (ids, weights)
        assert rows_of(h, n_embd) == n_rows and rows_of(logits, n_experts) == n_rows, (h, logits, ids)
        assert 1 <= n_used <= min(n_experts, MAX_USED) and n_experts <= MAX_EXPERTS, (n_used, n_experts)
        assert all(v is None or (v.shape == (n_experts,) and v.dtype == "f32") for v in (bias, select, gain))
        assert 1 <= g.n_group_used <= g.n_group <= MAX_GROUPS and n_experts % g.n_group == 0, g
        assert g.n_group == 1 or n_experts // g.n_group >= 2, g
        assert given is None or (g.n_group == 1 and select is None and rows_of(given, n_used) == n_rows), g
        self.record(
            "moe_topk",
            "f32",
            (logits, h, bias or logits, given or select or logits, gain or logits, ids, weights),
            {
                "n_embd": n_embd,
                "n_experts": n_experts,
                "n_used": n_used,
                "n_rows": n_rows,
                "n_groups": g.n_group,
                "n_groups_used": g.n_group_used,
                "norm_w": int(g.norm_w),
                "per_id": g.per_id,
                "eps": eps,
                "scale": g.scale,
                "logit_scale": g.logit_scale,
                "softcap": g.softcap,
            },
            {
                "LOCAL": 32 if self.limits.is_cpu or n_experts <= 32 else 128,
                "GATING": GATINGS.index(g.kind),
                "HAS_BIAS": int(bias is not None),
                "HAS_SELECT": 2 if given else int(select is not None),
                "HAS_GAIN": int(gain is not None),
            },
            (*self.fold(n_rows), 1),
            flops=n_rows * (2 * n_embd + n_experts * n_experts),
        )

    def moe_group(self, ids: View, groups: Groups, *, n_experts: int) -> None:
        """Sort the (row, expert) pairs of `ids` u32 [n_rows, n_used] by expert into `groups`."""
        n_pairs, n_tiles = ids.shape[0] * ids.shape[1], groups.tiles.shape[0]
        assert ids.dtype == groups.order.dtype == groups.tiles.dtype == "u32", (ids, groups)
        assert groups.order.shape == (n_pairs,) and groups.tiles.shape == (n_tiles, 3), (ids, groups)
        assert n_tiles >= tile_count(n_pairs, n_experts, groups.tile), (n_tiles, n_pairs, n_experts)
        push: dict[str, int | float] = {"n_pairs": n_pairs, "n_experts": n_experts}
        push |= {"tile": groups.tile, "n_tiles": n_tiles}
        args = ids, groups.order, groups.tiles
        self.record("moe_group", "f32", args, push, {"LOCAL": 128}, (1, 1, 1))

    def add_id(self, x: View, b: View, ids: View, y: View, *, starts: View | None = None) -> None:
        """Compute y[r, u] = x[r, u] + b[ids[r, u]]. Shapes: x [n_rows, n_used, n], b f32 [n_experts, n]. `y`
        may be `x`.

        If `starts` is given, the biases of expert e are the elements starts[e]..starts[e + 1] of b, at most
        n. Elements of y[r, u] without a bias are not written.
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
        """Compute y[r] = sum over u, in order, of weights[r, u] * x[r, u]. Shapes: x [n_rows, n_used, n], y
        [n_rows, n]."""
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
