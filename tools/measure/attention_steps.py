"""Records the ops of attention to all or to chosen positions, for a layer and a step on one device, as
meta/ops does. Nothing runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vkbackend import ops
from vkbackend.buffer import Buffer, Home, View
from vkbackend.limits import Limits
from vkbackend.meta.ops.chosen_attention import attend_to_all
from vkbackend.recording import Dispatch, Recording
from vkbackend.step import Mix

PROMPT = 512  # rows


@dataclass(frozen=True)
class Layer:
    """A layer's attention on one device: `heads` q heads of `kv` KV heads. An indexer chooses `top_k` blocks
    of `block` positions. With blocks of one position, its heads share a list. Otherwise, each KV head has a
    list."""

    name: str
    heads: int
    kv: int
    head_k: int
    head_v: int
    index_heads: int
    top_k: int
    block: int = 1
    index_head: int = 128


DEEPSEEK = Layer("DeepSeek V3.2, 128 heads", 128, 1, 576, 512, 64, 2048)
QUARTER = Layer("32 heads (one of four devices)", 32, 1, 576, 512, 64, 2048)
BLOCKS = Layer("block form, 64 heads", 64, 4, 128, 128, 4, 16, 128)


class _Views:
    """Views of one step of `rows` rows that end at position `n` - 1, in a cache for n positions."""

    def __init__(self, layer: Layer, rows: int, n: int) -> None:
        self.layer, self.rows, self.buffer = layer, rows, Buffer(1 << 40, Home.SCRATCH, "views")
        self.blocks_per_slot = -(-n // ops.CELL_BLOCK)
        n_cells = self.blocks_per_slot * ops.CELL_BLOCK
        self.q, self.out = self(rows, layer.heads, layer.head_k), self(rows, layer.heads, layer.head_v)
        self.k = self(n_cells, layer.kv * layer.head_k, dtype="f16")
        self.v = self(n_cells, layer.kv * layer.head_v, dtype="f16")
        self.cells = self(1, self.blocks_per_slot, dtype="u32")
        self.index_q = self(rows, layer.index_heads, layer.index_head)
        self.index_k = self(n_cells, layer.index_head, dtype="f16")
        self.n_lists = layer.kv if layer.block > 1 else 1
        self.lists = self(rows * self.n_lists, layer.top_k, dtype="u32")
        self.step = self(1 << 20, dtype="u32")
        self.how: dict[str, Any] = {"scale": 1.0, "group": layer.heads // layer.kv}

    def __call__(self, *shape: int, dtype: str = "f32") -> View:
        return View(self.buffer, 0, shape, dtype)

    def part(self, limits: Limits, n_blocks: int, tile_heads: int) -> View:
        layer, tiled = self.layer, {"tile_heads": tile_heads} if tile_heads else {}
        n_splits = ops.attn_splits(limits, self.rows, layer.heads, layer.kv, n_blocks, **tiled)
        return self.out if n_splits == 1 else self(self.rows, layer.heads, n_splits, layer.head_v + 2)


def _recorded(recorder: ops.Recorder) -> list[Dispatch]:
    return [c for c in recorder.recording.accesses() if isinstance(c, Dispatch)]


def plain(limits: Limits, layer: Layer, rows: int, n: int) -> list[Dispatch]:
    """Record attention to all positions (meta/ops/dense_attention.py)."""
    v, r = _Views(layer, rows, n), ops.Recorder(Recording("plain"), limits)
    args, heads = (v.q, v.k, v.v, v.cells), (layer.heads // layer.kv, layer.head_k, layer.head_v)
    if rows > 1:
        by_units = ops.attends_by_units(limits, rows, layer.head_k, layer.head_v)
        attend = r.attn_prefill_coop if by_units else r.attn_prefill
        attend(*args, v.out, v.step, n_runs=1, **v.how)
    else:
        units = ops.heads_by_units(limits, *heads)
        decode = r.attn_decode_coop if units else r.attn_decode
        decode(*args, v.part(limits, v.blocks_per_slot, units), v.step, **v.how)
    return _recorded(r)


def sparse(limits: Limits, layer: Layer, rows: int, n: int) -> list[Dispatch]:
    """Record the choice of positions, and attention to them (meta/ops/chosen_attention.py)."""
    v, r, block = _Views(layer, rows, n), ops.Recorder(Recording("sparse"), limits), layer.block
    heads = layer.heads // layer.kv, layer.head_k, layer.head_v
    n_blocks = -(-v.blocks_per_slot * ops.CELL_BLOCK // block)
    place: dict[str, Any] = {"n_best": layer.top_k, "block": block}
    if block == 1:
        scores, w = v(rows, n_blocks), v(rows, layer.index_heads)
        by_units = ops.scores_by_units(limits, layer.index_heads, layer.index_head)
        score = r.index_scores_coop if by_units else r.index_scores
        score(v.index_q, w, v.index_k, v.cells, scores, v.step, **place)
    else:
        maxima, place = v(rows, v.n_lists, n_blocks), place | {"n_local": 1}
        by_units = ops.maxima_by_units(limits, v.n_lists, layer.index_head, block, 1)
        index = r.index_maxima_coop if by_units else r.index_maxima
        index(v.index_q, v.index_k, v.cells, maxima, v.step, **place)
        scores = maxima.reshape(rows * v.n_lists, n_blocks)
    r.index_top_k(scores, v.lists, v.step, n_lists=v.n_lists, block=block)
    args = v.q, v.k, v.v, v.cells, v.lists
    of_blocks = ops.blocks_by_units(limits, *heads, block)
    units = of_blocks or ops.chosen_by_units(limits, *heads)
    seen = min(-(-layer.top_k * block // ops.CELL_BLOCK), v.blocks_per_slot)
    part, how = v.part(limits, seen, units), v.how | {"block": block}
    if of_blocks:
        joint = ops.joint_positions(limits, *heads, block, layer.top_k) if part is v.out else 0
        if joint:
            r.attn_blocks_coop(*args, part, v.step, joint=joint, together=True, **how)
        r.attn_blocks_coop(*args, part, v.step, joint=joint, **how)
    else:
        dense, mix = layer.top_k * block, Mix.PREFILL if rows > 1 else Mix.DECODE
        if units and attend_to_all(r, mix, args[:4], part, v.step, dense, v.how):
            how["dense"] = dense
        attend = r.attn_chosen_coop if units else r.attn_chosen
        attend(*args, part, v.step, **how)
    return _recorded(r)
