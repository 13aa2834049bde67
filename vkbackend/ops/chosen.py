"""Sparse attention (DeepSeek-AI 2025, arXiv:2512.02556): attention reads only the positions that an indexer
(indexer.py) chooses."""

from __future__ import annotations

import math
from typing import Required, TypedDict, Unpack

from vkbackend.buffer import View
from vkbackend.ops.attention import attn_push, check_aligned
from vkbackend.ops.attention_tiles import (
    CELL_BLOCK,
    MAX_JOINT,
    blocks_cut,
    cells_per_block,
    rows_cut,
    tile_of_chosen,
)
from vkbackend.ops.spec import SPECS
from vkbackend.ops.target import Target, rows_of


class ChosenKeywords(TypedDict, total=False):
    """Keywords that `attn_chosen` explains. `scale` and `q_first` are as in attn_decode."""

    scale: Required[float]
    group: Required[int]
    q_first: int
    block: int
    tail: bool


class ChosenOps(Target):
    def attn_chosen(
        self,
        q: View,
        k: View,
        v: View,
        cells: View,
        chosen: View,
        part: View,
        step: View,
        **how: Unpack[ChosenKeywords],
    ) -> None:
        """For every row of the step, compute attn_decode over the blocks in `chosen` u32 [n_rows * n_lists,
        n_chosen], up to the row's position. A block has `block` positions. A row has one list for all kv
        heads, or one for each. `tail` is as in index_top_k. Without `tail`, the row's own block must be
        chosen."""
        cut = rows_cut(self.limits, q.shape[2], how["group"])
        consts = {"LOCAL": cut.local, "HEADS": cut.heads, "BATCH": cut.batch}
        self._attend("attn_chosen", "f32", (q, k, v, cells, chosen, part, step), cut.tiles, consts, **how)

    def attn_chosen_coop(
        self,
        q: View,
        k: View,
        v: View,
        cells: View,
        chosen: View,
        part: View,
        step: View,
        *,
        dense: int = 0,
        **how: Unpack[ChosenKeywords],
    ) -> None:
        """Compute attn_chosen on matrix units. Values are rounded as in attn_decode_coop. Rows at
        positions below `dense` do not change."""
        group, head_v = how["group"], part.shape[-1] - 2 * (len(part.shape) > 3)
        tile, units = tile_of_chosen(self.limits, group, q.shape[2], head_v), self.limits.matrix_units
        assert tile, f"no tile of {units} fits heads of {q.shape[2]}, {head_v}"
        check_aligned(k, v)
        args = (q, k, v, cells, chosen, part, step), -(-group // tile.rows), {**tile.consts, "DENSE": dense}
        self._attend("attn_chosen_coop", units.api, *args, **how)

    def attn_blocks_coop(
        self,
        q: View,
        k: View,
        v: View,
        cells: View,
        chosen: View,
        part: View,
        step: View,
        *,
        joint: int = 0,
        together: bool = False,
        **how: Unpack[ChosenKeywords],
    ) -> None:
        """Compute attn_chosen on matrix units for blocks of a multiple of CELL_BLOCK positions. Values are
        rounded as in attn_decode_coop. With `together`, consecutive rows share the reads of the blocks that
        any of them has chosen, and only rows at positions below `joint` are written. Without, only rows from
        `joint` on and rows after the step's are written. `joint` is at most 32 blocks, and `part` then has no
        splits."""
        block, head_v = how.get("block", 1), part.shape[-1] - 2 * (len(part.shape) > 3)
        cut = blocks_cut(self.limits, how["group"], q.shape[2], head_v, block, together)
        assert cut, f"no tile of {self.limits.matrix_units} fits heads of {q.shape[2]}, {head_v}: {how}"
        assert joint <= MAX_JOINT * block and (not joint or len(part.shape) == 3), (joint, part)
        check_aligned(k, v)
        tile, rows = cut
        consts = {**tile.consts, "ROWS": rows, "LIST_BLOCK": block, "JOINT": joint}
        args = (q, k, v, cells, chosen, part, step), -(-how["group"] // (tile.rows // rows)), consts
        self._attend("attn_blocks_coop", self.limits.matrix_units.api, *args, **how)

    def _attend(
        self,
        op: str,
        variant: str,
        views: tuple[View, ...],
        tiles: int,
        consts: dict[str, int],
        *,
        scale: float,
        group: int,
        q_first: int = 0,
        block: int = 1,
        tail: bool = False,
    ) -> None:
        q, k, v, cells, chosen, part, step = views
        final = len(part.shape) == 3
        n_splits, head_v = (1, part.shape[2]) if final else (part.shape[2], part.shape[3] - 2)
        push, head_k, types = attn_push(q, k, v, cells, head_v, group, q_first)
        n_rows, n_heads = part.shape[:2]
        assert q.shape[:2] == (n_rows, n_heads) and part.dtype == "f32", (q, part)
        n_lists = rows_of(chosen, chosen.shape[1], "u32") // n_rows
        assert chosen.shape[0] == n_rows * n_lists and n_lists in (1, push["n_kv"]), (q, chosen)
        push |= {"n_splits": n_splits, "n_chosen": chosen.shape[1], "n_lists": n_lists}
        push |= {"block_size": block, "tail": int(tail), "scale": scale}
        consts = {**consts, "HEAD_K": head_k, "HEAD_V": head_v, **types, "FINAL": int(final)}
        self.record(
            op,
            variant,
            (q, k, v, cells, chosen, part),
            push,
            {name: consts[name] for name in SPECS[op].consts},
            (n_rows, int(push["n_kv"]) * tiles, n_splits),
            step,
            flops=2 * math.prod(q.shape[:2]) * chosen.shape[1] * block * (head_k + head_v),
        )

    def attn_entries(
        self,
        q: View,
        kv: View,
        cells: View,
        entry_cells: View,
        chosen: View | None,
        part: View,
        step: View,
        *,
        scale: float,
        window: int,
        block: int,
        first_entry: int,
        group: int,
        q_first: int = 0,
    ) -> None:
        """For every row of the step, compute attn_decode over the last `window` positions, including the
        row's own, and over entries of complete blocks of `block` positions. The first `first_entry` cells of
        `kv` [n_cells, head] hold vectors of positions, which are both key and value, at the places in
        `cells`. The others hold entries, as kv_store writes them with `block`, `first` = first_entry and
        `entry_cells`. Both tables have the same shape. `chosen` u32 [n_rows, n_chosen] lists up to
        n_chosen - 1 complete blocks, as index_top_k with `tail` writes them. Without `chosen`, a row attends
        to the entries of all complete blocks."""
        cut = rows_cut(self.limits, q.shape[2], group)
        head, final, per_block = q.shape[2], len(part.shape) == 3, cells_per_block(block)
        n_splits, head_v = (1, part.shape[2]) if final else (part.shape[2], part.shape[3] - 2)
        vectors = kv.rows(0, first_entry)
        push, _, types = attn_push(q, vectors, vectors, cells, head_v, group, q_first)
        n_rows, n_heads = part.shape[:2]
        n_chosen = chosen.shape[1] if chosen else 0
        assert q.shape[:2] == (n_rows, n_heads) and part.dtype == "f32" and head == head_v, (q, part)
        assert window > 0 and block > 0 and entry_cells.shape == cells.shape, (window, block, entry_cells)
        assert first_entry % CELL_BLOCK == (kv.shape[0] - first_entry) % per_block == 0, (kv, first_entry)
        assert chosen is None or (n_chosen > 1 and rows_of(chosen, n_chosen, "u32") == n_rows), chosen
        push |= {"n_splits": n_splits, "n_chosen": n_chosen, "block_size": block}
        push |= {"cells_per_block": per_block, "first_entry": first_entry, "window": window}
        consts = {"LOCAL": cut.local, "HEAD_K": head, "HEAD_V": head, "HEADS": cut.heads, **types}
        n_entries = n_chosen - 1 if chosen else cells.shape[1] * CELL_BLOCK // block
        self.record(
            "attn_entries",
            "f32",
            (q, kv, kv, cells, entry_cells, chosen or cells, part),
            {**push, "scale": scale},
            {**consts, "FINAL": int(final), "BATCH": cut.batch},
            (n_rows, cut.tiles, n_splits),
            step,
            flops=4 * math.prod(q.shape) * (window + n_entries),
        )
