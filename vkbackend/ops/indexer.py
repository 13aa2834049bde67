"""An indexer scores a row's positions, and chooses the best (DeepSeek-AI 2025, arXiv:2512.02556)."""

from __future__ import annotations

from typing import Required, TypedDict, Unpack

from vkbackend.buffer import View
from vkbackend.formats import block_of
from vkbackend.limits import Limits
from vkbackend.ops.attention import check_aligned
from vkbackend.ops.attention_tiles import CELL_BLOCK, MIN_UNIT_GROUP, MIN_UNIT_LANES, cells_per_block
from vkbackend.ops.kv_cache import CACHE_TYPES
from vkbackend.ops.spec import SPECS
from vkbackend.ops.target import Target, floor_pow2, rows_of

MAX_INDEX_HEAD = 256
INDEX_HEADS = 16  # heads per tile of index_scores; their q take up to 16 KiB of shared memory
MAX_SCORE_ROWS = 8  # rows per workgroup of index_scores_coop
BUSY_GROUPS = 1024  # Workgroups of index_scores_coop that fill a GPU.


class ScoreKeywords(TypedDict, total=False):
    """Keywords that `index_scores` explains."""

    first_row: int
    block: int
    n_best: int


class MaximaKeywords(TypedDict, total=False):
    """Keywords that `index_maxima` explains."""

    block: Required[int]
    n_local: Required[int]
    first_row: int
    n_best: int


def score_tile(limits: Limits, n_heads: int, head: int) -> dict[str, int] | None:
    """Return the constants of index_scores_coop. Return None if the device lacks matrix units, or if their
    size does not divide the head or exceeds shared memory."""
    units = limits.matrix_units
    if not limits.features.issuperset(SPECS["index_scores_coop"].needs) or head % units.k:
        return None
    groups = -(-n_heads // units.m)
    fh = min(2 if units.lanes >= MIN_UNIT_LANES else 1, groups)  # two matrices spill registers on Intel
    across = 2 if groups > fh else 1
    for down, fn in ((4 // across, 2), (4 // across, 1), (1, 1)):
        keys, heads = down * fn * units.n, across * fh * units.m
        nbytes = 2 * (keys + heads) * (head + 8) + 4 * (keys + heads * units.n + across * keys * units.m)
        local = across * down * units.lanes
        if nbytes <= limits.max_shared_nbytes and local <= limits.max_invocations:
            consts = {"LOCAL": local, "UNIT_M": units.m, "UNIT_N": units.n, "UNIT_K": units.k}
            consts["LANES"] = units.lanes
            return {**consts, "KEY_GROUPS": down, "HEAD_GROUPS": across, "FN": fn, "FH": fh}
    return None


def maxima_tile(limits: Limits, n_heads: int, head: int, block: int, n_local: int) -> dict[str, int] | None:
    """Return the constants of index_maxima_coop, without ROWS. Return None if the device lacks matrix units,
    or if no tile of keys divides the blocks and fits into shared memory. The row's own block must be
    local."""
    units = limits.matrix_units
    if not limits.features.issuperset(SPECS["index_maxima_coop"].needs) or head % units.k or not n_local:
        return None
    for fn in (4, 2):
        keys = fn * units.n
        nbytes = 2 * (keys + units.m) * (head + 8) + 4 * units.m * units.n
        if keys % CELL_BLOCK == block % keys == 0 and nbytes <= limits.max_shared_nbytes:
            consts = {"LOCAL": units.lanes, "UNIT_M": units.m, "UNIT_N": units.n, "UNIT_K": units.k}
            consts["LANES"] = units.lanes
            return {**consts, "FN": fn, "HEADS": min(floor_pow2(n_heads), units.m)}
    return None


def maxima_by_units(limits: Limits, n_heads: int, head: int, block: int, n_local: int) -> bool:
    """Return whether to use index_maxima_coop."""
    return not limits.is_cpu and maxima_tile(limits, n_heads, head, block, n_local) is not None


def scores_by_units(limits: Limits, n_heads: int, head: int) -> bool:
    """Return whether to use index_scores_coop. With fewer than four heads, most of a matrix would be
    empty."""
    if limits.is_cpu or n_heads < MIN_UNIT_GROUP:
        return False
    return score_tile(limits, n_heads, head) is not None


def _lanes(limits: Limits, n_heads: int, head: int) -> dict[str, int]:
    """Return the constants of the indexer's ops that run without matrix units."""
    heads = min(INDEX_HEADS if head <= MAX_INDEX_HEAD // 2 else INDEX_HEADS // 2, n_heads)
    local, batch = (32, 1) if limits.is_cpu else (128, 4 if head % 16 == 0 else 2)
    return {"LOCAL": local, "HEADS": heads, "BATCH": batch}


class IndexerOps(Target):
    def index_scores(
        self, q: View, w: View | None, k: View, cells: View, y: View, step: View, **how: Unpack[ScoreKeywords]
    ) -> None:
        """Compute y[r, b] = sum over heads h of w[r, h] * max(q[r, h] . k[p], 0) for the complete blocks b of
        `block` positions up to pos, where p is the block's last position. Without w, all weights are 1. Row r
        is row first_row + r of the step. Later blocks of y do not change, and rows with at most `n_best`
        complete blocks do not change.

        Shapes: q [n_rows, n_heads, head], w [n_rows, n_heads], y [n_rows, n_blocks]. The cache `k` [n_cells,
        head] has a type in CACHE_TYPES and a cell per block, as kv_store with `block` writes them.
        """
        n_heads, head = q.shape[1:]
        consts = _lanes(self.limits, n_heads, head)
        self._score("index_scores", "f32", (q, w, k, cells, y, step), consts["LOCAL"], 1, consts, **how)

    def index_scores_coop(
        self,
        q: View,
        w: View | None,
        k: View,
        cells: View,
        y: View,
        step: View,
        *,
        tile_rows: int = 0,
        **how: Unpack[ScoreKeywords],
    ) -> None:
        """Compute index_scores on matrix units. q and k are rounded to F16. A workgroup reads keys once for
        `tile_rows` rows of a slot (0: as many as leave enough workgroups)."""
        tile, units = score_tile(self.limits, *q.shape[1:]), self.limits.matrix_units
        assert tile, f"no tile of {units} fits the indexer's heads of {q.shape[2]}"
        check_aligned(k)
        n_keys = tile["KEY_GROUPS"] * tile["FN"] * units.n
        n_tiles = -(-cells.shape[1] * CELL_BLOCK // (how.get("block", 1) * n_keys))
        rows = tile_rows or max(1, min(MAX_SCORE_ROWS, q.shape[0] * n_tiles // BUSY_GROUPS))
        args = (q, w, k, cells, y, step), n_keys, rows, {**tile, "ROWS": rows}
        self._score("index_scores_coop", units.api, *args, **how)

    def _score(
        self,
        op: str,
        variant: str,
        views: tuple[View, View | None, View, View, View, View],
        n_keys: int,
        rows: int,
        consts: dict[str, int],
        *,
        first_row: int = 0,
        block: int = 1,
        n_best: int = 0,
    ) -> None:
        """A workgroup computes the scores of `n_keys` blocks for `rows` rows."""
        q, w, k, cells, y, step = views
        n_rows, n_heads, head = q.shape
        n_positions = cells.shape[1] * CELL_BLOCK // block
        assert w is None or w.shape == (n_rows, n_heads), (q, w)
        assert y.shape == (n_rows, n_positions), (q, y)
        per_block = cells_per_block(block)
        assert k.shape[1:] == (head,) and k.shape[0] % per_block == 0 and cells.dtype == "u32", (k, cells)
        assert head % max(8, block_of(k.dtype)[0]) == 0 and head <= MAX_INDEX_HEAD, k
        push: dict[str, int | float] = {"n_heads": n_heads, "n_rows": n_rows, "first_row": first_row}
        push |= {"blocks_per_slot": cells.shape[1], "n_positions": n_positions, "block_size": block}
        push |= {"cells_per_block": per_block, "n_best": n_best}
        consts = {**consts, "HEAD": head, "K_TYPE": CACHE_TYPES.index(k.dtype), "HAS_W": int(w is not None)}
        self.record(
            op,
            variant,
            (q, w or q, k, cells, y),
            push,
            {name: consts[name] for name in SPECS[op].consts},
            (-(-n_positions // n_keys), 1, -(-n_rows // rows)),
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
        self, q: View, k: View, cells: View, y: View, step: View, **how: Unpack[MaximaKeywords]
    ) -> None:
        """Compute y[r, h, b] = maximum of q[r, h] . k[p] over the positions p <= pos of block b. Row r is row
        first_row + r of the step, and pos its position. The block that contains pos and the n_local - 1
        blocks before it get the largest finite float instead. Later blocks of y do not change, and rows with
        at most `n_best` blocks do not change.

        Shapes: q [n_rows, n_heads, head], y [n_rows, n_heads, n_blocks]. The cache `k` [n_cells, head] has a
        type in CACHE_TYPES.
        """
        self._maxima("index_maxima", "f32", (q, k, cells, y, step), _lanes(self.limits, *q.shape[1:]), **how)

    def index_maxima_coop(
        self,
        q: View,
        k: View,
        cells: View,
        y: View,
        step: View,
        *,
        tile_rows: int = 0,
        **how: Unpack[MaximaKeywords],
    ) -> None:
        """Compute index_maxima on matrix units. q and k are rounded to F16. A workgroup reads keys once for
        `tile_rows` rows of a slot (0: as many as a matrix holds and leave enough workgroups)."""
        limits, (n_rows, n_heads, head), n_blocks = self.limits, q.shape, y.shape[2]
        tile = maxima_tile(limits, n_heads, head, how["block"], how["n_local"])
        assert tile, f"no tile of {limits.matrix_units} fits {n_heads} index heads of {head}, {how}"
        check_aligned(k)
        most = tile["UNIT_M"] // tile["HEADS"]
        rows = min(most, tile_rows or max(1, n_rows * n_blocks // BUSY_GROUPS))
        consts = {**tile, "ROWS": rows}
        self._maxima("index_maxima_coop", limits.matrix_units.api, (q, k, cells, y, step), consts, **how)

    def _maxima(
        self,
        op: str,
        variant: str,
        views: tuple[View, View, View, View, View],
        consts: dict[str, int],
        *,
        block: int,
        n_local: int,
        first_row: int = 0,
        n_best: int = 0,
    ) -> None:
        """A workgroup computes a block's maxima for HEADS heads of ROWS rows."""
        q, k, cells, y, step = views
        (n_rows, n_heads, head), n_blocks = q.shape, y.shape[2]
        assert y.shape[:2] == (n_rows, n_heads) and n_blocks * block >= cells.shape[1] * CELL_BLOCK, (q, y)
        assert k.shape[1:] == (head,) and k.shape[0] % CELL_BLOCK == 0 and cells.dtype == "u32", (k, cells)
        assert head % max(8, block_of(k.dtype)[0]) == 0 and head <= MAX_INDEX_HEAD, k
        consts = {**consts, "HEAD": head, "K_TYPE": CACHE_TYPES.index(k.dtype)}
        push: dict[str, int | float] = {"n_heads": n_heads, "n_rows": n_rows, "first_row": first_row}
        push |= {"blocks_per_slot": cells.shape[1], "n_blocks": n_blocks}
        self.record(
            op,
            variant,
            (q, k, cells, y),
            {**push, "block_size": block, "n_local": n_local, "n_best": n_best},
            {name: consts[name] for name in SPECS[op].consts},
            (n_blocks, -(-n_heads // consts["HEADS"]), -(-n_rows // consts.get("ROWS", 1))),
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
        batch = 1 if self.limits.is_cpu else 8
        # Each thread reads `batch` values at once, if there are enough.
        local = 32 if self.limits.is_cpu else max(64, min(1024, floor_pow2(n_positions // batch)))
        push: dict[str, int | float] = {"n_positions": n_positions, "n_rows": n_rows}
        push |= {"first_row": first_row, "n_chosen": k, "n_lists": n_lists}
        push |= {"block_size": block, "tail": int(tail)}
        consts = {"LOCAL": min(local, floor_pow2(self.limits.max_invocations)), "BATCH": batch}
        self.record("index_top_k", "f32", (x, ids), push, consts, (1, 1, n_rows), step)
