"""Sparse attention (DeepSeek-AI 2025, arXiv:2512.02556). An indexer scores a row's positions, and attention
reads only the best positions."""

from __future__ import annotations

import math

from vkbackend.buffer import View
from vkbackend.formats import block_of
from vkbackend.ops.attention import attn_push, rows_cut
from vkbackend.ops.attention_tiles import CELL_BLOCK, cells_per_block
from vkbackend.ops.kv_cache import CACHE_TYPES
from vkbackend.ops.target import Target, floor_pow2, rows_of

MAX_INDEX_HEAD = 256
INDEX_HEADS = 16  # heads per tile of index_scores; their q take up to 16 KiB of shared memory


class ChosenOps(Target):
    def index_scores(
        self,
        q: View,
        w: View | None,
        k: View,
        cells: View,
        y: View,
        step: View,
        *,
        first_row: int = 0,
        block: int = 1,
    ) -> None:
        """Compute y[r, b] = sum over heads h of w[r, h] * max(q[r, h] . k[p], 0) for the complete blocks b of
        `block` positions up to pos, where p is the block's last position. Without w, all weights are 1. Row r
        is row first_row + r of the step. Later blocks of y do not change.

        Shapes: q [n_rows, n_heads, head], w [n_rows, n_heads], y [n_rows, n_blocks]. The cache `k` [n_cells,
        head] has a type in CACHE_TYPES and a cell per block, as kv_store with `block` writes them.
        """
        n_rows, n_heads, head = q.shape
        n_positions = cells.shape[1] * CELL_BLOCK // block
        assert w is None or w.shape == (n_rows, n_heads), (q, w)
        assert y.shape == (n_rows, n_positions), (q, y)
        per_block = cells_per_block(block)
        assert k.shape[1:] == (head,) and k.shape[0] % per_block == 0 and cells.dtype == "u32", (k, cells)
        assert head % max(8, block_of(k.dtype)[0]) == 0 and head <= MAX_INDEX_HEAD, k
        heads = min(INDEX_HEADS if head <= MAX_INDEX_HEAD // 2 else INDEX_HEADS // 2, n_heads)
        local, batch = (32, 1) if self.limits.is_cpu else (128, 4 if head % 16 == 0 else 2)
        consts = {"LOCAL": local, "HEAD": head, "HEADS": heads, "K_TYPE": CACHE_TYPES.index(k.dtype)}
        push: dict[str, int | float] = {"n_heads": n_heads, "n_rows": n_rows, "first_row": first_row}
        push |= {"blocks_per_slot": cells.shape[1], "n_positions": n_positions, "block_size": block}
        push["cells_per_block"] = per_block
        self.record(
            "index_scores",
            "f32",
            (q, w or q, k, cells, y),
            push,
            {**consts, "BATCH": batch, "HAS_W": int(w is not None)},
            (-(-n_positions // local), 1, n_rows),
            step,
            flops=2 * n_rows * n_heads * n_positions * head,
        )

    def pool_keys(
        self,
        k: View,
        cells: View,
        y: View,
        step: View,
        *,
        block: int,
        bias: View | None = None,
        first: int = 0,
        overlap: bool = False,
    ) -> None:
        """For each row whose position is the last of a block of `block` positions, write the mean of the
        block's keys to y [n_rows, head]. The keys are the elements from `first` on of the cache `k` [n_cells,
        width]. With `bias` f32 [block, head], gates follow the keys, and the mean is weighted. The weights of
        each element are softmax(gate + bias) over the block's positions. With `overlap`, a position has two
        keys and two gates, and bias is [block, 2 * head]. The mean is then over the second keys of the block
        and the first keys of the block before it, if any (DeepSeek-AI 2026). Other rows get zeros. `k` has a
        float type."""
        (n_rows, head), series = y.shape, 1 + overlap
        width = k.shape[1]
        assert first + (2 if bias else 1) * series * head <= width, (k, bias, y, first)
        assert head % 4 == first % 4 == width % 4 == 0 and (bias or not overlap), (k, bias, y, first)
        assert bias is None or (bias.shape == (block, series * head) and bias.dtype == "f32"), bias
        assert k.dtype in ("f32", "f16", "bf16") and cells.dtype == "u32", (k, cells)
        consts = {"LOCAL": 32, "HEAD": head, "K_TYPE": CACHE_TYPES.index(k.dtype), "GATED": int(bool(bias))}
        consts["SERIES"] = series
        push: dict[str, int | float] = {"n_rows": n_rows, "blocks_per_slot": cells.shape[1]}
        push |= {"block_size": block, "cell_quads": width // 4, "first_quad": first // 4}
        groups = (-(-head // 128), 1, n_rows)
        args = k, cells, bias or y, y
        self.record("pool_keys", "f32", args, push, consts, groups, step)

    def index_maxima(
        self,
        q: View,
        k: View,
        cells: View,
        y: View,
        step: View,
        *,
        block: int,
        n_local: int,
        first_row: int = 0,
    ) -> None:
        """Compute y[r, h, b] = maximum of q[r, h] . k[p] over the positions p <= pos of block b. Row r is row
        first_row + r of the step, and pos its position. The block that contains pos and the n_local - 1
        blocks before it get the largest finite float instead. Later blocks of y do not change.

        Shapes: q [n_rows, n_heads, head], y [n_rows, n_heads, n_blocks]. The cache `k` [n_cells, head] has a
        type in CACHE_TYPES.
        """
        (n_rows, n_heads, head), n_blocks = q.shape, y.shape[2]
        assert y.shape[:2] == (n_rows, n_heads) and n_blocks * block >= cells.shape[1] * CELL_BLOCK, (q, y)
        assert k.shape[1:] == (head,) and k.shape[0] % CELL_BLOCK == 0 and cells.dtype == "u32", (k, cells)
        assert head % max(8, block_of(k.dtype)[0]) == 0 and head <= MAX_INDEX_HEAD, k
        heads = min(INDEX_HEADS if head <= MAX_INDEX_HEAD // 2 else INDEX_HEADS // 2, n_heads)
        local, batch = (32, 1) if self.limits.is_cpu else (128, 4 if head % 16 == 0 else 2)
        consts = {"LOCAL": local, "HEAD": head, "HEADS": heads, "K_TYPE": CACHE_TYPES.index(k.dtype)}
        push: dict[str, int | float] = {"n_heads": n_heads, "n_rows": n_rows, "first_row": first_row}
        push |= {"blocks_per_slot": cells.shape[1], "n_blocks": n_blocks}
        self.record(
            "index_maxima",
            "f32",
            (q, k, cells, y),
            {**push, "block_size": block, "n_local": n_local},
            {**consts, "BATCH": batch},
            (n_blocks, -(-n_heads // heads), n_rows),
            step,
            flops=2 * n_rows * n_heads * n_blocks * block * head,
        )

    def index_top_k(
        self,
        x: View,
        ids: View,
        step: View,
        *,
        first_row: int = 0,
        n_lists: int = 1,
        block: int = 1,
        tail: bool = False,
    ) -> None:
        """For each list x[r * n_lists + i, 0..b], write the indices of the k largest values in ascending
        order. Row r is row first_row + r of the step, and b is the block of `block` positions that contains
        the row's position. Of equal values, the one with the lower index is chosen. NaN is the largest value.
        With `tail`, k - 1 complete blocks are chosen, and the row's own block follows if it is incomplete.

        Shapes: x [n_rows * n_lists, n_blocks], ids u32 [n_rows * n_lists, k]. If there are fewer blocks than
        k, the last ids do not change.
        """
        (n_rows, n_positions), k = x.shape, ids.shape[1]
        assert n_rows % n_lists == 0 and k > tail, (x, ids)
        assert rows_of(ids, k, "u32") == n_rows and rows_of(x, n_positions) == n_rows, (x, ids)
        local, batch = (32, 1) if self.limits.is_cpu else (1024, 8)
        push: dict[str, int | float] = {"n_positions": n_positions, "n_rows": n_rows}
        push |= {"first_row": first_row, "n_chosen": k, "n_lists": n_lists}
        push |= {"block_size": block, "tail": int(tail)}
        consts = {"LOCAL": min(local, floor_pow2(self.limits.max_invocations)), "BATCH": batch}
        self.record("index_top_k", "f32", (x, ids), push, consts, (1, 1, n_rows), step)

    def attn_chosen(
        self,
        q: View,
        k: View,
        v: View,
        cells: View,
        chosen: View,
        part: View,
        step: View,
        *,
        scale: float,
        group: int,
        q_first: int = 0,
        block: int = 1,
        tail: bool = False,
    ) -> None:
        """For every row of the step, compute attn_decode over the blocks in `chosen` u32 [n_rows * n_lists,
        n_chosen], up to the row's position. A block has `block` positions. A row has one list for all kv
        heads, or one for each. `tail` is as in index_top_k. Without `tail`, the row's own block must be
        chosen."""
        cut = rows_cut(self.limits, q.shape[2], group)
        final = len(part.shape) == 3
        n_splits, head_v = (1, part.shape[2]) if final else (part.shape[2], part.shape[3] - 2)
        push, head_k, types = attn_push(q, k, v, cells, head_v, group, q_first)
        n_rows, n_heads = part.shape[:2]
        assert q.shape[:2] == (n_rows, n_heads) and part.dtype == "f32", (q, part)
        n_lists = rows_of(chosen, chosen.shape[1], "u32") // n_rows
        assert chosen.shape[0] == n_rows * n_lists and n_lists in (1, push["n_kv"]), (q, chosen)
        push |= {"n_splits": n_splits, "n_chosen": chosen.shape[1], "n_lists": n_lists}
        push |= {"block_size": block, "tail": int(tail), "scale": scale}
        consts = {"LOCAL": cut.local, "HEAD_K": head_k, "HEAD_V": head_v, "HEADS": cut.heads, **types}
        self.record(
            "attn_chosen",
            "f32",
            (q, k, v, cells, chosen, part),
            push,
            {**consts, "FINAL": int(final), "BATCH": cut.batch},
            (n_rows, int(push["n_kv"]) * cut.tiles, n_splits),
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
