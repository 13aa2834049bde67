"""The mixture of experts (Shazeer et al. 2017). Every device holds some FFN columns of every expert. So an
exchange sums n_embd values per row, however many experts a row uses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vkbackend import ops as device_ops
from vkbackend.buffer import View
from vkbackend.meta import split
from vkbackend.meta.ops.elementwise import F32_MAX
from vkbackend.meta.ops.groups import groups_of, tiles_in_parts
from vkbackend.meta.ops.low_rank import adapt_experts, expert_ids
from vkbackend.meta.ops.matrix import convert, n_parts, operand_of
from vkbackend.meta.split import MIRRORED
from vkbackend.meta.sums import whole
from vkbackend.meta.tensor import Tensor, TensorGraph, Weight
from vkbackend.ops.moe import Gating


@dataclass(frozen=True, slots=True)
class Router:
    """`w` [n_expert, n_embd] maps norm(h) to logits; `w_norm` is the weight of the norm. The vectors `bias`,
    `select` and `gain` are [n_expert]. `bias` is added to the logits. `select` is added to the probabilities
    only for the choice. `gain` multiplies an expert's weight. If `given` [rows, n_used] is set, it contains
    the ids of each row's experts, and the logits only give their weights."""

    w_norm: Weight
    w: Weight
    eps: float
    gating: Gating
    n_used: int
    bias: Weight | None = None
    select: Weight | None = None
    gain: Weight | None = None
    given: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """Matrices are gate, up [n_expert, n_ff, n_embd] and down [n_expert, n_embd, n_ff].
    Biases are gate_bias, up_bias [n_expert, n_ff, 1] and down_bias [n_expert, n_embd]. Without a gate, the
    activation `act` must depend on `up` only."""

    gate: Weight | None
    up: Weight
    down: Weight
    gate_bias: Weight | None = None
    up_bias: Weight | None = None
    down_bias: Weight | None = None
    act: str = "silu"
    weighs_input: bool = False  # multiply x, not the result, by the expert's weight
    limit: float = 0.0  # upper bound of act(gate x), and bound of |up x| (0: none)
    limits_gate: bool = False  # the upper bound applies to gate x, not to act(gate x)
    situ: tuple[float, float] | None = None  # the soft-caps of situ_mul, instead of `act`


@dataclass(slots=True)
class _Pairs:
    """The pairs (row, expert) of ids u32 [n_rows, n_used]. If experts have slots, `hits` are the pairs of
    experts in slots, by slot id, and `misses` are all other pairs."""

    ids: View
    groups: device_ops.Groups | None
    misses: _Pairs | None = None
    hits: _Pairs | None = None


def moe(x: Tensor, h: Tensor, router: Router, experts: Experts) -> Tensor:
    """Return the weighted sum of down(act(gate x) * up x) over the chosen experts, as a PARTIAL tensor.

    All devices choose the same experts, because the residual h has the same bits on all devices.
    """
    x, h, graph, e = whole(x), whole(h), x.graph, experts
    biases = [bias.state for bias in (e.gate_bias, e.up_bias) if bias]
    state = split.moe(x.state, router.w.state, (e.gate or e.up).state, e.up.state, e.down.state, *biases)
    y = graph.new(x.rows, x.width, state, "moe")
    routed = _route(h, router, state.writers)
    stacks, n_experts = [w for w in (e.gate, e.up, e.down) if w], e.up.shape[0]
    pairs_on = {
        d: _pairs(graph, d, replace(routed[1].on(d), dtype="u32"), n_experts, state.writers, stacks)
        for d in state.writers
    }
    ids_on = {d: pairs.ids for d, pairs in pairs_on.items()}
    graph.fetch_experts(ids_on, n_experts, [*stacks, *filter(None, (e.gate_bias, e.up_bias))])
    for d in state.writers:
        on, pairs = graph.on(d, "moe"), pairs_on[d]
        weights, ids, groups = routed[0].on(d), pairs.ids, pairs.groups
        widths = [ranges[d][1] - ranges[d][0] for ranges in e.up.state.experts]
        width, equal = max(widths), min(widths) == max(widths)
        a, b = (graph.scratch((x.rows, router.n_used, width), "moe columns") for _ in range(2))
        matrices = [(e.gate, e.gate_bias, a)] if e.gate else []
        each = graph.scratch((x.rows, router.n_used, x.width), "moe experts")
        weighs_rows = e.weighs_input and router.n_used == 1  # x has one weight per row
        if weighs_rows:
            each = y.on(d).reshape(*each.shape)
        # An expert with fewer than `width` columns does not write the ends of rows. Only activations read
        # these ends.
        weighed = _weighed(graph, d, x.on(d), weights) if weighs_rows else None
        adapted = expert_ids(graph, d, ids, (e.gate, e.up, e.down))
        for w, bias, out in (*matrices, (e.up, e.up_bias, b)):
            kind = _operand_type(graph, d, w, groups)
            operand = convert(graph, d, weighed, kind) if weighed else operand_of(x, d, kind)
            _experts(graph, d, w, bias, operand, pairs, out)
            adapt_experts(graph, d, w, weighed or x.on(d), adapted, out)
        if e.weighs_input and not weighs_rows:
            # down(act(w gate x) * (w up x)) = w down(act(w gate x) * up x)
            assert e.gate and not (e.gate_bias or e.up_bias or e.down_bias), "biases have no weight"
            a = _weighed(graph, d, a, weights)
        _activate(graph, on, e, a, b)
        operand = convert(graph, d, a, _operand_type(graph, d, e.down, groups, whole_rows=equal))
        bias = e.down_bias if d == state.writers[0] else None
        _experts(graph, d, e.down, bias, operand, pairs, each)
        adapt_experts(graph, d, e.down, a, adapted, each)
        if not weighs_rows:
            on.moe_sum(each, weights, y.on(d))
    return y


def _activate(graph: TensorGraph, on: device_ops.Recorder, e: Experts, a: View, b: View) -> None:
    """Write the activated columns to `a`, which holds gate x if there is a gate. `b` holds up x."""
    if e.situ:
        beta, linear_beta = e.situ
        capped = graph.scratch(a.shape, "moe capped")
        on.softcap(a, capped, c=beta)
        on.glu(a, capped, a, act="sigmoid")
        if linear_beta:
            on.softcap(b, b, c=linear_beta)
        on.glu(a, b, a, act="none")
        return
    if not e.limit:
        on.glu(a if e.gate else b, b, a, act=e.act)
        return
    assert e.act == "silu" and e.gate, e.act
    if not e.limits_gate:
        on.glu(a, a, a, act="silu_alone")
    on.clamp(a, a, low=-F32_MAX, high=e.limit)
    on.clamp(b, b, low=-e.limit, high=e.limit)
    on.glu(a, b, a, act="silu" if e.limits_gate else "none")


def _weighed(graph: TensorGraph, d: int, x: View, weights: View) -> View:
    y, n_rows, width = graph.scratch(x.shape, "moe weighed"), math.prod(x.shape[:-1]), x.shape[-1]
    by_row = weights.reshape(n_rows, 1)
    graph.on(d, "moe").moe_sum(x.reshape(n_rows, 1, width), by_row, y.reshape(n_rows, width))
    return y


def _route(h: Tensor, router: Router, devices: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    graph, n_expert = h.graph, router.w.shape[0]
    logits, weights, chosen = (
        graph.new(h.rows, width, MIRRORED, f"moe_{name}", devices)
        for name, width in (("logits", n_expert), ("weights", router.n_used), ("ids", router.n_used))
    )
    for d in devices:
        on = graph.on(d, "moe")
        on.moe_logits(h.on(d), router.w_norm.whole(d), router.w.whole(d), logits.on(d))
        vectors = {"bias": router.bias, "select": router.select, "gain": router.gain}
        on.moe_topk(
            logits.on(d),
            h.on(d),
            replace(chosen.on(d), dtype="u32"),
            weights.on(d),
            router.gating,
            eps=router.eps,
            given=router.given.on(d) if router.given else None,
            **{name: vector.whole(d) for name, vector in vectors.items() if vector},
        )
    return weights, chosen


def _operand_type(
    graph: TensorGraph, d: int, w: Weight, groups: device_ops.Groups | None, *, whole_rows: bool = True
) -> str:
    limits = graph.devices[d].limits
    return device_ops.experts_operand_type(limits, graph.kind.n_rows, w.dtype, groups, whole_rows=whole_rows)


def _pairs(
    graph: TensorGraph, d: int, ids: View, n_experts: int, writers: tuple[int, ...], stacks: Sequence[Weight]
) -> _Pairs:
    """Return the pairs of `ids`. If a stack has slots, also return the hits and the misses, and count the
    pairs on the first device of each node."""
    slots = [w.slots for w in stacks if w.slots]
    if not slots:
        return _Pairs(ids, groups_of(graph, d, ids, n_experts, "moe"))
    table, inputs = slots[0].table, graph.inputs[d]
    assert inputs.experts and inputs.counts, "the step's shape has no expert caches"
    node, counts = graph.devices[d].node, None
    if d == next(w for w in writers if graph.devices[w].node == node):
        at = inputs.counts.offset + 4 * (graph.lane * inputs.counts.shape[1] + table.counts_at)
        counts = View(inputs.counts.buffer, at, (n_experts,), "u32")
    known = View(inputs.experts.buffer, inputs.experts.offset + 4 * table.at, (n_experts,), "u32")
    missed, hit = (
        replace(graph.scratch(ids.shape, f"moe {name}"), dtype="u32") for name in ("misses", "hits")
    )
    graph.on(d, "moe").moe_lookup(ids, known, missed, hit, inputs.step, counts)
    misses = _Pairs(missed, groups_of(graph, d, missed, n_experts, "moe misses"))
    hits = _Pairs(hit, groups_of(graph, d, hit, n_experts, "moe hits", table.n_ids(d)))
    partly = len(slots) < len(stacks)  # a stack without slots needs all pairs together
    groups = groups_of(graph, d, ids, n_experts, "moe") if partly else misses.groups
    return _Pairs(ids, groups, misses, hits)


def _experts(
    graph: TensorGraph, d: int, w: Weight, bias: Weight | None, x: View, pairs: _Pairs, out: View
) -> None:
    """Compute out[r, u] = W_e x[r] (or W_e x[r, u]) for expert e = ids[r, u], with the columns that device d
    holds."""
    ids = pairs.ids
    if w.slots and pairs.hits and pairs.misses:
        table, region = w.slots.table, graph.inputs[d].experts
        assert region is not None
        stride, at = table.strides[d], region.offset + 4 * table.starts_at
        starts = View(region.buffer, at, (table.n_ids(d) + 1,), "u32")
        pieces = [(stride * first, view) for first, view in w.slots.pieces[d]]
        # Reads over the bus take longer, so they begin first.
        _product(graph, d, w, w.pieces[d], w.shape[0], w.starts[d], x, pairs.misses, out)
        _product(graph, d, w, pieces, table.n_ids(d), starts, x, pairs.hits, out)
    else:
        _product(graph, d, w, w.pieces[d], w.shape[0], w.starts[d], x, pairs, out)
    if bias:
        values, bias_starts = bias.whole(d), bias.starts.get(d)
        graph.on(d, bias).add_id(out, values, ids, out, starts=bias_starts)


def _product(
    graph: TensorGraph,
    d: int,
    w: Weight,
    pieces: Sequence[tuple[int, View]],
    n_ids: int,
    starts: View,
    x: View,
    pairs: _Pairs,
    out: View,
) -> None:
    on, ends = graph.on(d, w), [*(first for first, _ in pieces[1:]), n_ids]
    groups = pairs.groups
    for (first, piece), end in zip(pieces, ends, strict=True):
        parts: Sequence[device_ops.Groups | None] = [None]
        if groups:
            flops = 2 * math.prod(pairs.ids.shape) * math.prod(piece.shape[1:])
            parts = tiles_in_parts(groups, n_parts(graph, d, graph.kind.n_rows, flops))
        for part in parts:
            on.mat_id(
                piece,
                x,
                pairs.ids,
                starts,
                out,
                axis=w.state.axis - 1,
                groups=part,
                first=first,
                count=end - first,
            )
