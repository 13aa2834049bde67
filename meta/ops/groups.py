"""Pairs (row, expert), sorted by expert so that a tile reads an expert's weights once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from vkbackend import ops as device_ops
from vkbackend.buffer import View
from vkbackend.meta.tensor import TensorGraph


def groups_of(
    graph: TensorGraph, d: int, ids: View, n_experts: int, label: str, n_ids: int = 0
) -> device_ops.Groups | None:
    """Sort the pairs of `ids` u32 [n_rows, n_used], or return None for too few pairs. The ids are below
    `n_ids` (default: n_experts). The choice of the tile depends on n_experts only."""
    on = graph.on(d, label)
    n_rows, n_used = ids.shape
    if not (tile := device_ops.tile_size(on.limits, n_rows, n_used, n_experts)):
        return None
    n_experts = n_ids or n_experts
    n_pairs = n_rows * n_used
    n_tiles = device_ops.tile_count(n_pairs, n_experts, tile)
    order, tiles = (
        replace(graph.scratch(shape, f"{label} groups"), dtype="u32") for shape in ((n_pairs,), (n_tiles, 3))
    )
    groups = device_ops.Groups(order, tiles, tile)
    on.moe_group(ids, groups, n_experts=n_experts)
    return groups


def tiles_in_parts(groups: device_ops.Groups, n: int) -> list[device_ops.Groups]:
    """Divide the tiles into `n` parts. For any routing, their sizes differ by at most one tile. An expert
    with tiles in two parts is read twice."""
    n_tiles = groups.tiles.shape[0]
    bounds = [n_tiles * i // n for i in range(n + 1)]
    return [replace(groups, tiles=groups.tiles.rows(*bound)) for bound in pairwise(bounds)]
