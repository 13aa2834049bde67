"""Computes how often the loops of attention and of the indexer run, from an op's constants and a step.

`OF` has a function for each op. It returns the workgroups that do not exit at once, the trips of the loops in
RADV's order for NAVI31 (loop_tree.py), and the multiply-adds of a workgroup. The multiply-adds come from the
tile's size, so they check the trips. Trips that depend on data have their largest value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vkbackend.ops.attention_tiles import CELL_BLOCK
from vkbackend.tools.measure.attention_steps import Layer
from vkbackend.tools.measure.loop_tree import Trips

Consts = Mapping[str, int]
NEVER: Trips = (0, ())
ONCE: Trips = (1, ())


@dataclass(frozen=True)
class Shape:
    """A dispatch for `rows` rows, each with `n` positions. `groups` is the grid of workgroups."""

    layer: Layer
    rows: int
    n: int
    groups: tuple[int, int, int]

    @property
    def n_blocks(self) -> int:
        return -(-self.n // self.layer.block)

    @property
    def scores(self) -> bool:
        return self.n_blocks > self.layer.top_k

    @property
    def n_chosen(self) -> int:
        """Return the positions that a row attends to. Its own block may be incomplete."""
        own = (self.n - 1) % self.layer.block + 1
        return min(self.n, (self.layer.top_k - 1) * self.layer.block + own)


class Work(NamedTuple):
    workgroups: float
    trips: Trips
    macs: float  # of a workgroup
    extra: float = 0.0  # the largest share of other multiply-adds, of the softmax and of surplus elements


def times(n: float, *inner: Trips) -> Trips:
    return n, inner


def _up(n: float, by: float) -> int:
    return math.ceil(n / by)


def _blocks(positions: int, splits: int) -> float:
    """Return the mean number of blocks of a split."""
    return _up(positions, CELL_BLOCK) / splits


def _of_row(c: Consts, s: Shape, positions: int, *lookup: Trips) -> Work:
    """lib/row_attention.glsl"""
    lanes, k_quads, v_quads = c["LOCAL"] // CELL_BLOCK, c["HEAD_K"] // 4, c["HEAD_V"] // 4
    turns = _up(k_quads, c["BATCH"] * lanes)
    v_step = c["BATCH"] * max(1, c["LOCAL"] // v_quads)
    blocks = _blocks(positions, s.groups[2])
    sums = times(_up(c["HEADS"] * CELL_BLOCK, c["LOCAL"]))
    per_block = times(blocks, *lookup, times(1, times(turns)), sums, sums, times(_up(CELL_BLOCK, v_step)))
    trips = times(1, times(_up(c["HEADS"] * k_quads, c["LOCAL"])), ONCE, per_block)
    macs = c["HEADS"] * CELL_BLOCK * blocks * (c["HEAD_K"] + c["HEAD_V"])
    return Work(math.prod(s.groups), trips, macs, 0.15)


def attn_decode(c: Consts, s: Shape) -> Work:
    return _of_row(c, s, s.n)


def attn_chosen(c: Consts, s: Shape) -> Work:
    return _of_row(c, s, s.n_chosen, ONCE)


def attn_prefill(c: Consts, s: Shape) -> Work:
    groups, k_quads, blocks = c["LOCAL"] // CELL_BLOCK, c["HEAD_K"] // 4, _up(s.n, CELL_BLOCK)
    pieces, v_steps = times(_up(k_quads, max(c["BATCH"], groups))), times(_up(CELL_BLOCK, c["BATCH"]))
    load = times(_up(c["TQ"] * k_quads, c["LOCAL"]))
    trips = times(1, ONCE, times(0, NEVER), load, times(blocks, pieces, v_steps))
    macs = c["TQ"] * CELL_BLOCK * blocks * (c["HEAD_K"] + c["HEAD_V"])
    return Work(_up(s.rows, c["TQ"]) * s.groups[1], trips, macs, 0.3)


def _of_tile(
    c: Consts, blocks: float, before: tuple[Trips, ...], per_block: tuple[Trips, ...]
) -> tuple[Trips, float]:
    """lib/unit_attention.glsl"""
    rows = c["UNIT_M"] * c["ROW_GROUPS"]
    load = times(_up(rows * c["HEAD_K"] // 4, c["LOCAL"]))
    trips = times(1, *before, load, times(blocks, *per_block))
    return trips, rows * CELL_BLOCK * blocks * (c["HEAD_K"] + c["HEAD_V"])


def _rounds(c: Consts, unroll: str = "UNROLL") -> Trips:
    return times(c["HEAD_K"] // (c[unroll] * c["UNIT_K"]))


def _parts(c: Consts) -> tuple[Trips, ...]:
    """lib/unit_chunks.glsl"""
    rounds = times(c["HEAD_K"] // (c["K_CHUNKS"] * c["DIM_PARTS"] * c["UNROLL"] * c["UNIT_K"]))
    return (rounds,) * c["K_CHUNKS"]


def attn_decode_coop(c: Consts, s: Shape) -> Work:
    workgroups = 0 if 0 < c["MOST"] < s.n else math.prod(s.groups)
    return Work(workgroups, *_of_tile(c, _blocks(s.n, s.groups[2]), (), _parts(c)))


def attn_prefill_coop(c: Consts, s: Shape) -> Work:
    tiles = 0 if 0 < c["MOST"] < s.n else _up(s.rows, c["UNIT_M"] * c["ROW_GROUPS"])
    before = ONCE, times(0, NEVER)  # finding the tile, and rows after the last
    return Work(tiles * s.groups[1], *_of_tile(c, _up(s.n, CELL_BLOCK), before, _parts(c)))


def attn_blocks_coop(c: Consts, s: Shape) -> Work:
    """Rows of a tile are assumed to choose all blocks together."""
    rounds = _rounds(c, "SCORE_UNROLL")
    if c["ROWS"] == 1:
        workgroups: float = 0 if s.n <= c["JOINT"] else math.prod(s.groups)
        return Work(workgroups, *_of_tile(c, _blocks(s.n_chosen, s.groups[2]), (), (rounds,)))
    workgroups = s.rows / c["ROWS"] * s.groups[1] if s.n <= c["JOINT"] else 0
    before = times(c["ROWS"] - 1), ONCE, times(_up(c["ROWS"] * 32, c["LOCAL"]))
    return Work(workgroups, *_of_tile(c, _up(s.n, CELL_BLOCK), before, (rounds,)))


def attn_chosen_coop(c: Consts, s: Shape) -> Work:
    ahead = max(1, c["LOCAL"] // CELL_BLOCK)
    per_block = times(1 / ahead), *_parts(c)
    (_, (load, blocks)), macs = _of_tile(c, _blocks(s.n_chosen, s.groups[2]), (), per_block)
    find_cells = ONCE
    workgroups = 0 if s.n <= c["DENSE"] else math.prod(s.groups)
    return Work(workgroups, times(1, load, find_cells, blocks), macs)


def index_scores(c: Consts, s: Shape) -> Work:
    quads, tiles = c["HEAD"] // 4, _up(s.layer.index_heads, c["HEADS"])
    loads = times(_up(c["HEADS"] * quads, c["LOCAL"])), times(_up(c["HEADS"], c["LOCAL"]))
    trips = times(1, times(tiles, *loads, times(_up(quads, c["BATCH"]))))
    workgroups = _up(s.n, c["LOCAL"]) * s.rows if s.scores else 0
    return Work(workgroups, trips, c["LOCAL"] * tiles * c["HEADS"] * c["HEAD"], 0.1)


def index_scores_coop(c: Consts, s: Shape) -> Work:
    keys, heads = c["KEY_GROUPS"] * c["FN"] * c["UNIT_N"], c["HEAD_GROUPS"] * c["FH"] * c["UNIT_M"]
    local, rows, tiles = c["LOCAL"], c["ROWS"], _up(s.layer.index_heads, heads)
    # Keys are loaded once for all rows of a workgroup.
    load = (
        times((rows - 1) / rows),
        times(_up(keys, local) / rows),
        times(_up(keys * c["HEAD"] // 8, 4 * local) / rows),
    )
    of_heads = times(_up(heads * c["HEAD"] // 4, 4 * local)), times(_up(heads * c["UNIT_N"], local))
    scores = times(tiles, *of_heads, times(c["HEAD"] // (4 * c["UNIT_K"])))
    trips = times(1, times(rows, *load, scores, times(_up(keys, local))))
    workgroups = _up(s.n, keys) * s.rows / rows if s.scores else 0
    return Work(workgroups, trips, rows * keys * tiles * heads * c["HEAD"])


def index_maxima_coop(c: Consts, s: Shape) -> Work:
    keys, block = c["FN"] * c["UNIT_N"], s.layer.block
    scores = times(block // keys, times(c["HEAD"] // (4 * c["UNIT_K"])))
    trips = times(1, times(1, times(c["ROWS"] - 1), scores, ONCE))
    workgroups = s.n_blocks * s.groups[1] * s.rows / c["ROWS"] if s.scores else 0
    return Work(workgroups, trips, block * c["UNIT_M"] * c["HEAD"])


def index_top_k(c: Consts, s: Shape) -> Work:
    n, local, batch = s.n_blocks, c["LOCAL"], c["BATCH"]
    few, stretch = min(local, 64), _up(n, local)
    is_few, is_many = s.scores and n <= few, s.scores and n > few
    read = times(_up(stretch, batch) * is_many)
    bytes_ = times(4 * is_many, times(_up(256, local)), times(_up(n, batch * local)), times(15), times(15))
    spans = local // 32
    counts = times(is_many, times(32)), times(spans / 2 * is_many), times(31 * is_many)
    write = times(_up(n, local) * (not s.scores)), times(_up(n, 4) * is_few)
    return Work(s.groups[2], times(1, *write, bytes_, read, *counts, read), 0)


OF: dict[str, Callable[[Consts, Shape], Work]] = {
    of.__name__: of
    for of in (
        attn_decode,
        attn_decode_coop,
        attn_prefill,
        attn_prefill_coop,
        attn_chosen,
        attn_chosen_coop,
        attn_blocks_coop,
        index_scores,
        index_scores_coop,
        index_maxima_coop,
        index_top_k,
    )
}
