"""Chooses the attention shaders' tiles and the number of key splits."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from vkbackend.limits import Limits
from vkbackend.ops.matrix import MAX_VEC_ROWS
from vkbackend.ops.spec import SPECS

CELL_BLOCK = 32  # Positions per entry of the cell table, as in shaders/lib/step.glsl.
MAX_TILE = 1536  # The most floats of q in a tile of attn_decode (6 KiB); scores and sums take 8 KiB.
MAX_TILE_QUERIES = 8  # heads times rows
MAX_SPLITS = 64  # With 64 splits, a row with 4 KV heads has 256 workgroups.
MAX_UNIT_HEAD = 256  # The largest head whose K and V pass through shared memory whole.
MIN_UNIT_GROUP = 4  # Minimum number of q heads per KV head for attn_decode_coop.
# Minimum number of lanes per subgroup for attn_decode_coop. With 16 lanes or fewer (Intel), reading a block
# spills up to 370 registers.
MIN_UNIT_LANES = 32
# Registers per lane for the output of a subgroup and for pieces of K and V that pass through shared memory in
# parts. With 132, 41 registers spill on NVIDIA.
MAX_PART_REGISTERS = 120
_CHUNKS = (1, 2, 3, 4), (1, 2, 4)  # parts of K and of V
ORDER = "V_PARTS", "DIM_PARTS", "K_CHUNKS", "UNROLL"  # the constants that change the order of additions
MAX_JOINT = 32  # The most blocks of a row in a tile of several rows of attn_blocks_coop: bits of a word.
# Instructions for a key of a row in such a tile, relative to a row alone (docs/measurements/kernels.md).
JOINT_COST = 0.57
MAX_HELD = 24  # 16-byte vectors of K and V per invocation; 32 spill on NVIDIA


def cells_per_block(block: int) -> int:
    """Return the number of cells of a cache per CELL_BLOCK positions, if a cell covers `block` positions. The
    number is even, because two cells of a quantized type may share a word."""
    n = -(-CELL_BLOCK // block)
    return n + n % 2


def attn_splits(
    limits: Limits,
    n_rows: int,
    n_heads: int,
    n_kv: int,
    blocks_per_slot: int,
    window: int = 0,
    tile_heads: int = MAX_TILE_QUERIES,
) -> int:
    """Return the number of key splits. The splits fill a GPU with workgroups. A split has at least 4 blocks
    of keys. If a row's bits must not depend on the number of rows, a step of few rows uses as many splits as
    a step of one row."""
    if limits.batch_invariant and n_rows <= MAX_VEC_ROWS:
        n_rows = 1
    wanted = 1 if limits.is_cpu else -(-256 // (n_rows * n_kv * -(-n_heads // (n_kv * tile_heads))))
    seen = min(blocks_per_slot, -(-window // CELL_BLOCK) + 1) if window else blocks_per_slot
    return max(1, min(wanted, seen // 4, MAX_SPLITS))


def batch_of(limits: Limits) -> int:
    """Return how many 4-element vectors of K or V a thread loads ahead: 8 on a GPU, and 1 on a CPU or without
    subgroups."""
    return 8 if limits.subgroup_size > 1 and not limits.is_cpu else 1


class RowsCut(NamedTuple):
    """How attn_decode divides the q heads of a KV head among `tiles` workgroups of `local` threads. A
    workgroup computes `heads` heads of up to `rows` rows."""

    tiles: int
    heads: int
    rows: int
    local: int
    batch: int


def rows_cut(limits: Limits, head_k: int, group: int, run_rows: int = 1) -> RowsCut:
    """`run_rows` is the maximum number of rows of a run. Neither `rows` nor `batch` changes the order of
    additions."""
    most = max(1, min(MAX_TILE_QUERIES, MAX_TILE // head_k))
    tiles = -(-group // most)
    heads = -(-group // tiles)
    rows = min(run_rows, most // heads)
    # With more than 4 queries, eight vectors exceed Intel's registers.
    batch = min(batch_of(limits), 8 if heads * rows <= 4 else 4)
    # `local` must be a multiple or a divisor of CELL_BLOCK.
    return RowsCut(tiles, heads, rows, 8 if limits.is_cpu else 128, batch)


class Tile(NamedTuple):
    """An attention shader's rows per workgroup and specialization constants."""

    rows: int
    consts: dict[str, int]
    last: dict[str, int]  # The constants after K_TYPE and V_TYPE.


def tile_of_rows(limits: Limits, head_k: int, quantized: bool) -> Tile:
    rows = 16 if head_k <= 128 and not limits.is_cpu else 8 if head_k <= 320 else 4
    batch = batch_of(limits)
    # On Mali, eight vectors double or triple the spills (docs/measurements/arm.md). The shader reads pairs of
    # blocks of quantized K only in batches of eight.
    if limits.few_registers and not quantized:
        batch = min(batch, 4)
    return Tile(rows, {"LOCAL": 32 if limits.is_cpu else 128, "TQ": rows}, {"BATCH": batch})


def tile_of_units(
    limits: Limits, n_rows: int, head_k: int, head_v: int, op: str = "attn_prefill_coop"
) -> Tile | None:
    """Return the tile of attn_prefill_coop or attn_decode_coop. Return None if the device lacks matrix units,
    or if their size does not divide heads, keys or subgroups. A tile has up to four groups of rows, limited
    by n_rows and shared memory. A prefill group has as few subgroups as can hold the output in registers. A
    decode group has as many subgroups as possible, so that more loads are in flight. For heads above
    MAX_UNIT_HEAD, see `tile_in_parts`."""
    units = limits.matrix_units
    if max(head_k, head_v) > MAX_UNIT_HEAD:
        return tile_in_parts(limits, n_rows, head_k, head_v, op)
    if not limits.features.issuperset(SPECS[op].needs):
        return None
    if head_k % units.k or head_v % units.n or CELL_BLOCK % units.n or CELL_BLOCK % units.k:
        return None
    if units.lanes % units.m or units.n % (units.lanes // units.m):
        return None
    # Registers per lane for a subgroup's output. Subgroups of 16 lanes or fewer (Intel) have half as many.
    most, each = 32 if units.lanes <= 16 else 64, units.m * units.n // units.lanes
    in_row = units.lanes // units.m  # invocations per row, each with at least four keys
    able = [
        parts
        for parts in (1, 2, 4)
        if head_v // units.n // parts * each <= most
        and head_v // units.n % parts == CELL_BLOCK // units.n % parts == 0
        and parts * in_row <= CELL_BLOCK // 4
    ]
    if not able:
        return None
    decodes = op == "attn_decode_coop"
    # at most 16 keys per invocation
    few = next((parts for parts in able if parts * in_row > 1), able[0])
    parts = able[-1] if decodes else few
    held = CELL_BLOCK * (head_k + head_v) // 8
    tile = None
    for groups in (4, 2, 1):
        rows, local = units.m * groups, units.lanes * groups * parts
        halves = rows * (head_k + 8 + CELL_BLOCK + 8)
        halves += max(CELL_BLOCK * (head_k + 8), head_v * (CELL_BLOCK + 8))
        nbytes = 2 * halves + 4 * rows * (CELL_BLOCK + 4) + 4 * local
        if nbytes > limits.max_shared_nbytes or local > limits.max_invocations:
            continue
        if decodes and units.lanes >= MIN_UNIT_LANES and held > MAX_HELD * local:
            break
        consts = {"LOCAL": local, "UNIT_M": units.m, "UNIT_N": units.n, "UNIT_K": units.k}
        consts |= {"LANES": units.lanes, "ROW_GROUPS": groups, "V_PARTS": parts}
        consts |= {"DIM_PARTS": 1, "K_CHUNKS": 1, "V_CHUNKS": 1}
        twice = units.lanes > 16 and math.gcd(head_k, CELL_BLOCK) % (2 * units.k) == 0
        tile = Tile(rows, {**consts, "UNROLL": 1 + twice}, {})
        if rows < 2 * n_rows:
            break
    return tile


def attends_by_units(limits: Limits, n_rows: int, head_k: int, head_v: int) -> bool:
    """Return whether to use attn_prefill_coop. It needs a GPU with matrix units whose size divides the
    heads. Narrow subgroups would spill an output of more than MAX_UNIT_HEAD values."""
    is_narrow = limits.matrix_units.lanes < MIN_UNIT_LANES
    if limits.is_cpu or (is_narrow and head_v > MAX_UNIT_HEAD):
        return False
    return tile_of_units(limits, n_rows, head_k, head_v) is not None


def units_cut(
    limits: Limits, group: int, head_k: int, head_v: int, run_rows: int = 1
) -> tuple[Tile, int] | None:
    """Return the tile of attn_decode_coop, and how many rows of a run share the tile. Return None like
    `tile_of_units`. If more rows share a tile, it has more groups, but each group adds in the same order."""
    single = tile_of_units(limits, group, head_k, head_v, "attn_decode_coop")
    for rows in (8, 4, 2):
        if single and rows <= run_rows:
            tile = tile_of_units(limits, group * rows, head_k, head_v, "attn_decode_coop")
            assert tile, (group, rows)
            same = all(tile.consts[name] == single.consts[name] for name in ORDER)
            if same and tile.rows // rows >= min(group, single.rows):
                return tile, rows
    return single and (single, 1)


def heads_by_units(limits: Limits, group: int, head_k: int, head_v: int) -> int:
    """Return the heads per tile of attn_decode_coop, or 0 if attn_decode is faster. If subgroups are wide,
    attn_decode_coop is faster for four or more q heads per KV head (docs/measurements/kernels.md)."""
    if limits.is_cpu or group < MIN_UNIT_GROUP or limits.matrix_units.lanes < MIN_UNIT_LANES:
        return 0
    tile = tile_of_units(limits, group, head_k, head_v, "attn_decode_coop")
    return tile.rows if tile else 0


def tile_of_chosen(limits: Limits, group: int, head_k: int, head_v: int) -> Tile | None:
    """Return the tile of attn_chosen_coop."""
    return tile_in_parts(limits, group, head_k, head_v, "attn_chosen_coop")


def tile_in_parts(limits: Limits, n_rows: int, head_k: int, head_v: int, op: str) -> Tile | None:
    """Return the tile of an op in which K and V of large heads pass through shared memory in parts. Return
    None if the device lacks matrix units, or if their size does not divide heads, keys or subgroups. A row
    group has the most subgroups of which each invocation has at least four keys. A tile has as many row
    groups as `n_rows` need and shared memory allows."""
    units = limits.matrix_units
    if not limits.features.issuperset(SPECS[op].needs):
        return None
    if CELL_BLOCK % units.n or CELL_BLOCK % units.k or units.lanes % units.m:
        return None
    in_row, columns = units.lanes // units.m, CELL_BLOCK // units.n
    if units.n % in_row:
        return None
    # With large heads, subgroups share the dimensions of a score, so that a matrix of q serves more keys.
    shares = (4, 2, 1) if head_k > MAX_UNIT_HEAD else (1, 2, 4)
    # Compilers unroll the loop over V's parts only if the keys of a block are multiplied without a loop.
    is_wide = units.lanes >= MIN_UNIT_LANES
    unrolls = (2, 1) if is_wide else (1,)
    for groups, parts, unroll, k_chunks, v_chunks, dims in product(
        (4, 2, 1), (8, 4, 2, 1), unrolls, *_CHUNKS, shares
    ):
        rows, local, key_parts = units.m * groups, units.lanes * groups * parts, parts // dims
        if (groups > 1 and rows >= 2 * n_rows) or local > limits.max_invocations:
            continue
        if parts * in_row > CELL_BLOCK // 4 or not key_parts or columns % key_parts:
            continue
        k, v = head_k // k_chunks, head_v // v_chunks
        step = unroll * units.k
        if (
            head_k % (k_chunks * dims * step)
            or CELL_BLOCK % step
            or head_v % (v_chunks * parts * units.n)
            or k % 8
            or v % 8
        ):
            continue
        halves = rows * (head_k + 8 + CELL_BLOCK + 8) + max(CELL_BLOCK * (k + 8), v * (CELL_BLOCK + 8))
        floats = rows * max(dims * (CELL_BLOCK + 4), parts * units.n) + local + 2 * max(local, CELL_BLOCK)
        held = -(-CELL_BLOCK * k // (8 * local)) + 4 * -(-v // local)
        registers = head_v * units.m // (parts * units.lanes) + 4 * held
        if 2 * halves + 4 * floats > limits.max_shared_nbytes or (is_wide and registers > MAX_PART_REGISTERS):
            continue
        consts = {"LOCAL": local, "UNIT_M": units.m, "UNIT_N": units.n, "UNIT_K": units.k}
        consts |= {"LANES": units.lanes, "ROW_GROUPS": groups, "V_PARTS": parts, "DIM_PARTS": dims}
        consts |= {"K_CHUNKS": k_chunks, "V_CHUNKS": v_chunks, "UNROLL": unroll}
        return Tile(rows, consts, {})
    return None


def chosen_by_units(limits: Limits, group: int, head_k: int, head_v: int) -> int:
    """Return the heads per tile of attn_chosen_coop, or 0 if attn_chosen is faster (heads_by_units)."""
    if limits.is_cpu or group < MIN_UNIT_GROUP or limits.matrix_units.lanes < MIN_UNIT_LANES:
        return 0
    tile = tile_of_chosen(limits, group, head_k, head_v)
    return tile.rows if tile else 0


def blocks_cut(
    limits: Limits, group: int, head_k: int, head_v: int, block: int, together: bool = False
) -> tuple[Tile, int] | None:
    """Return the tile of attn_blocks_coop, and how many rows share it: one, or 8, 4 or 2 with `together`.
    Return None like `tile_of_units`, for heads above MAX_UNIT_HEAD, or if a block is no multiple of
    CELL_BLOCK."""
    if block % CELL_BLOCK or max(head_k, head_v) > MAX_UNIT_HEAD:
        return None
    if not limits.features.issuperset(SPECS["attn_blocks_coop"].needs):
        return None
    if not together:
        tile = tile_of_units(limits, group, head_k, head_v, "attn_decode_coop")
        return tile and (_unrolled(tile, head_k), 1)
    limits = replace(limits, max_shared_nbytes=limits.max_shared_nbytes - 4 * MAX_TILE_QUERIES)
    for rows in (8, 4, 2):
        tile = tile_of_units(limits, group * rows, head_k, head_v)
        if tile and tile.rows // rows >= group:
            return _unrolled(tile, head_k), rows
    return None


def _unrolled(tile: Tile, head_k: int) -> Tile:
    """Add SCORE_UNROLL. Four rounds at once save 5 % of a tile's instructions on RADV."""
    unroll = tile.consts["UNROLL"]
    if unroll > 1 and head_k % (2 * unroll * tile.consts["UNIT_K"]) == 0:
        unroll *= 2
    return tile._replace(consts=tile.consts | {"SCORE_UNROLL": unroll})


def blocks_by_units(limits: Limits, group: int, head_k: int, head_v: int, block: int) -> int:
    """Return the heads per tile of attn_blocks_coop, or 0 if attn_chosen or attn_chosen_coop compute the
    lists (heads_by_units)."""
    if limits.is_cpu or group < MIN_UNIT_GROUP or limits.matrix_units.lanes < MIN_UNIT_LANES:
        return 0
    cut = blocks_cut(limits, group, head_k, head_v, block)
    return cut[0].rows if cut else 0


def joint_positions(limits: Limits, group: int, head_k: int, head_v: int, block: int, n_chosen: int) -> int:
    """Return below which position rows of a prompt share tiles of attn_blocks_coop: as long as a tile that
    reads all blocks has fewer instructions than rows that read only their n_chosen blocks."""
    if blocks_cut(limits, group, head_k, head_v, block, together=True) is None:
        return 0
    return min(MAX_JOINT, int(n_chosen / JOINT_COST)) * block
