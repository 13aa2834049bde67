"""Low-rank adapters update a product: y += scale * B (A x), for each adapter of a row.

If W's columns are split, every device applies the complete B to its partial A x. B is linear, so the
all-reduce of y also sums the updates.

`Inputs.adapters` of a step holds each row's adapter ids u32 [n_rows, n] and scales f32 [n_rows, n], then the
ids and scales of the output rows, where n is StepKind.adapters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vkbackend import ops as device_ops
from vkbackend.buffer import View
from vkbackend.errors import PlanError
from vkbackend.meta.ops.groups import groups_of
from vkbackend.meta.tensor import LowRank, Tensor, TensorGraph, Weight
from vkbackend.ops.moe import MAX_EXPERTS

A, B, STARTS = ".lora_a", ".lora_b", "lora_starts."


def attach(weights: Mapping[str, Weight], n_adapters: int) -> None:
    """Set each weight's adapter pairs. B has the weight's name and the suffix .lora_b. A has the suffix
    .lora_a after the weight's name, or after the `group_name` of several weights."""
    for name, a in weights.items():
        if not name.endswith(A):
            continue
        is_stack, members = len(a.shape) == 3, members_of(name.removesuffix(A))
        width, first = a.shape[1] if is_stack else a.shape[0] // n_adapters, 0
        starts = None if is_stack else weights[f"{STARTS}{width}"]
        for member in members:
            b = weights[member + B]
            rank = width if is_stack else b.shape[1] // n_adapters
            weights[member].low_rank = LowRank(a, b, rank, width, first, starts)
            first += rank


def group_name(names: Sequence[str]) -> str:
    """Return the name of an A that several weights of a layer share, such as blk.0.attn_q,attn_k."""
    if len(names) == 1:
        return names[0]
    parts = [name.removesuffix(".weight").rpartition(".") for name in names]
    return f"{parts[0][0]}.{','.join(matrix for _, _, matrix in parts)}"


def members_of(name: str) -> list[str]:
    layer, _, matrices = name.rpartition(".")
    return [f"{layer}.{matrix}.weight" for matrix in matrices.split(",")] if "," in matrices else [name]


def adapters_of(graph: TensorGraph, d: int, *, of_outputs: bool = False) -> tuple[View, View]:
    """Return the ids and the scales of the rows or of the output rows."""
    kind, region = graph.kind, graph.inputs[d].adapters
    assert region is not None, "the step's shape has no adapters"
    n, at = kind.adapters, region.offset
    if of_outputs:
        at += 8 * n * kind.n_rows
    shape = (kind.n_outputs if of_outputs else kind.n_rows), n
    words = shape[0] * n
    return View(region.buffer, at, shape, "u32"), View(region.buffer, at + 4 * words, shape)


def adapt(x: Tensor, w: Weight, y: Tensor) -> None:
    """If rows of this step may have adapters, add the adapters' updates to y = x W^T. `x` contains a row per
    row of the step."""
    graph = x.graph
    if not graph.kind.adapters or w.low_rank is None or x.rows != graph.kind.n_rows:
        return
    graph.adapted.add(w.name)
    for d, out in enumerate(y.views):
        if out is not None:
            rows, key = adapters_of(graph, d), (d, w.low_rank.a.name)
            if key not in x.low_rank:
                x.low_rank[key] = _product(
                    graph, d, w.low_rank, x.on(d), rows[0], _groups(graph, d, w.low_rank)
                )
            _add(graph, d, w.low_rank, x.low_rank[key], out, out, rows)


def adapt_logits(graph: TensorGraph, d: int, x: Tensor, w: Weight, product: View, y: View) -> None:
    """Set y to the product of the output rows plus the adapters' updates."""
    assert w.low_rank
    graph.adapted.add(w.name)
    rows = adapters_of(graph, d, of_outputs=True)
    _add(graph, d, w.low_rank, _product(graph, d, w.low_rank, x.on(d), rows[0], None), product, y, rows)


def _product(
    graph: TensorGraph, d: int, pairs: LowRank, x: View, ids: View, groups: device_ops.Groups | None
) -> View:
    """Return A x for each row and each of its adapters, f32 [n_rows, n_terms, pairs.width]."""
    assert pairs.starts is not None
    if len(pairs.a.pieces[d]) > 1:
        raise PlanError(f"{pairs.a.name} exceeds one binding; load fewer adapters, or adapters of lower rank")
    t = graph.scratch((*ids.shape, pairs.width), "lora")
    starts = pairs.starts.whole(d)
    graph.on(d, pairs.a).mat_id(pairs.a.whole(d), x, ids, starts, t, axis=device_ops.ROWS, groups=groups)
    return t


def _add(
    graph: TensorGraph, d: int, pairs: LowRank, t: View, product: View, y: View, rows: tuple[View, View]
) -> None:
    (ids, scales), width = rows, y.shape[-1]
    n_last = math.prod(t.shape) - pairs.width + pairs.rank  # the end of W's columns in the last row
    part = View(t.buffer, t.offset + 4 * pairs.first, (n_last,))
    for first, b in pairs.b.pieces[d]:
        n = b.shape[0]
        of_product, of_y = _columns(product, first, n), _columns(y, first, n)
        strides: dict[str, Any] = {"y_stride": width, "t_stride": pairs.width}
        graph.on(d, pairs.b).low_rank_add(
            b, part, ids, scales, of_product, of_y, n=n, rank=pairs.rank, **strides
        )


def _columns(y: View, first: int, n: int) -> View:
    """Return the view of columns first..first + n. It ends after the last row's last column."""
    n_rows, width = y.shape
    return y if n == width else View(y.buffer, y.offset + 4 * first, ((n_rows - 1) * width + n,))


def _groups(graph: TensorGraph, d: int, pairs: LowRank) -> device_ops.Groups | None:
    """Return the pairs (row, adapter) in the order of adapters, sorted once for all weights, or None for few
    rows."""
    if d not in graph.adapter_groups:
        assert pairs.starts is not None
        ids, n_adapters = adapters_of(graph, d)[0], pairs.starts.shape[0] - 1
        graph.adapter_groups[d] = groups_of(graph, d, ids, n_adapters, "adapters")
    return graph.adapter_groups[d]


# ---- experts ----


@dataclass(frozen=True, slots=True)
class ExpertIds:
    """The ids of a row's pairs (adapter, expert), u32 [n_rows, n_used], and the pairs sorted by id."""

    ids: View
    groups: device_ops.Groups | None


def expert_ids(graph: TensorGraph, d: int, experts: View, stacks: Sequence[Weight | None]) -> list[ExpertIds]:
    """Return the ids of pairs for each adapter of a row, or an empty list if no stack has adapters. `experts`
    u32 [n_rows, n_used] are the chosen experts. Raises PlanError for too many rows."""
    adapted = [stack for stack in stacks if stack and stack.low_rank]
    if not adapted or not graph.kind.adapters:
        return []
    pairs, n_expert = adapted[0].low_rank, adapted[0].shape[0]
    assert pairs is not None
    of_terms, n_ids = [], pairs.a.shape[0]
    for term in range(graph.kind.adapters):
        ids = replace(graph.scratch(experts.shape, "lora ids"), dtype="u32")
        adapters, _ = adapters_of(graph, d)
        on = graph.on(d, "adapters")
        on.adapter_experts(adapters, experts, ids, term=term, n_experts=n_expert)
        groups = groups_of(graph, d, ids, n_ids, "adapters") if n_ids <= MAX_EXPERTS else None
        if groups is None and math.prod(ids.shape) > on.limits.max_groups[2]:
            raise PlanError(
                f"{math.prod(ids.shape)} pairs of rows and experts exceed the device's grid; use a smaller "
                "n_ubatch (-ub)"
            )
        of_terms.append(ExpertIds(ids, groups))
    return of_terms


def adapt_experts(
    graph: TensorGraph, d: int, w: Weight, x: View, of_terms: Sequence[ExpertIds], y: View
) -> None:
    """Add the adapters' updates to y[r, u] = W_e x, for the ids from `expert_ids`. `x` is [n_rows, n_in] or
    [n_rows, n_used, n_in]."""
    if not of_terms or (pairs := w.low_rank) is None:
        return
    graph.adapted.add(w.name)
    _, scales = adapters_of(graph, d)
    axis = device_ops.COLUMNS if w.state.axis == 2 else device_ops.ROWS
    for term, (ids, groups) in enumerate((each.ids, each.groups) for each in of_terms):
        n_rows, n_used = ids.shape
        t = graph.scratch((n_rows, n_used, pairs.rank), "lora")
        for first, count, a in _pieces(pairs.a, d):
            where = {"axis": axis, "first": first, "count": count}
            graph.on(d, pairs.a).mat_id(a, x, ids, pairs.a.starts[d], t, groups=groups, **where)
        for first, count, b in _pieces(pairs.b, d):
            graph.on(d, pairs.b).low_rank_add(
                b,
                t.reshape(n_rows * n_used, 1, pairs.rank),
                ids,
                scales,
                y,
                y,
                n=y.shape[-1],
                starts=pairs.b.starts[d],
                n_used=n_used,
                s_first=term,
                first=first,
                count=count,
            )


def _pieces(stack: Weight, d: int) -> Iterator[tuple[int, int, View]]:
    """Yield (first matrix, number of matrices, view) of each piece."""
    ends = [*(first for first, _ in stack.pieces[d][1:]), stack.shape[0]]
    for (first, view), end in zip(stack.pieces[d], ends, strict=True):
        yield first, end - first, view
