"""Chooses the tiles of products on matrix units, in F16 and int8."""

from __future__ import annotations

from vkbackend.limits import Limits, MatrixUnits
from vkbackend.ops.matrix import BUSY_TILES, Grid, Size, fills
from vkbackend.ops.target import floor_pow2

_TK = 32  # Elements of k per slice in mat_mul_coop.
UNIT_TILE = "M N K FM FN SM SN LANES"  # After LOCAL, from unit_consts.
# Subgroups of 16 lanes or fewer have 128 registers per lane (Intel). With 32 sums per lane, enough registers
# remain for matrices and addresses. With 128 sums, all kernels spilled registers, up to 486 on DG2.
_NARROW, _NARROW_SUMS = 16, 32
_MAX_SUBGROUPS = 64  # The most subgroups per workgroup on Intel.
_ROW_NBYTES = 2 * _TK + 16  # Bytes of shared memory per row of a tile in mat_mul_coop.
# Bytes of shared memory per row in mat_mul_dot_coop: 64 codes, 16 bytes of padding, and 2 floats for each of
# 2 blocks.
_INT8_ROW_NBYTES = 96


def tiles_of_units(limits: Limits, size: Size) -> Grid:
    tile_m, tile_n, across, down = coop_tile(limits, size.n, size.n_rows)
    consts = unit_consts(limits.matrix_units, tile_m, tile_n, across, down)
    return Grid(consts, -(-size.n // tile_m), -(-size.n_rows // tile_n))


def int8_tiles_of_units(limits: Limits, size: Size) -> Grid:
    tile_m, tile_n, across, down = coop_tile(limits, size.n, size.n_rows, _INT8_ROW_NBYTES)
    consts = unit_consts(limits.matrix_units, tile_m, tile_n, across, down)
    consts["K"] = limits.matrix_units.int8_k
    return Grid(consts, -(-size.n // tile_m), -(-size.n_rows // tile_n))


def coop_tile(
    limits: Limits, n: int, n_rows: int, row_nbytes: int = _ROW_NBYTES
) -> tuple[int, int, int, int]:
    """Return (rows of w, rows of x, subgroups along w, subgroups along x) of the first suitable tile. A tile
    must fit shared memory, and n_rows must fill more than half of the tile's rows of x. Tiles of 64 x 96 and
    128 x 128 are used only if they occupy a GPU and need little padding."""
    units = limits.matrix_units
    for tile_m, tile_n in ((64, 96), (128, 128), (64, 64), (64, 32)):
        across, down = subgroups(limits, tile_m, tile_n)
        nbytes = (tile_m + tile_n) * row_nbytes + 4 * across * down * units.m * units.n
        suits = n_rows > tile_n // 2
        if tile_n > 64:
            suits &= -(-n // tile_m) * -(-n_rows // tile_n) >= BUSY_TILES and fills(n_rows, tile_n)
        if tile_n == 96:
            # One tile of 96 rows takes 0.56 to 0.71 times as long as two tiles of 64 rows, by counted
            # instructions (docs/measurements/kernels.md). Subgroups of 16 lanes or fewer spilled registers.
            suits &= 64 < n_rows <= 96 and units.lanes > _NARROW and tile_n % (down * units.n) == 0
        if suits and nbytes <= limits.max_shared_nbytes:
            break
    return tile_m, tile_n, across, down


def subgroups(limits: Limits, tile_m: int, tile_n: int) -> tuple[int, int]:
    """Return (subgroups along w, subgroups along x) of a tile. A tile has at least four subgroups and 128
    invocations. Subgroups of 16 lanes or fewer have at most 32 sums per lane if the device allows enough
    subgroups."""
    units = limits.matrix_units
    count = max(4, 128 // units.lanes)
    if units.lanes <= _NARROW:
        count = max(count, tile_m * tile_n // (_NARROW_SUMS * units.lanes))
    count = min(count, _MAX_SUBGROUPS, max(1, limits.max_invocations // units.lanes))
    down = min(1 << (floor_pow2(count).bit_length() - 1) // 2, tile_n // units.n)
    return min(floor_pow2(count) // down, tile_m // units.m), down


def unit_consts(units: MatrixUnits, tile_m: int, tile_n: int, across: int, down: int) -> dict[str, int]:
    consts = {"LOCAL": across * down * units.lanes, "M": units.m, "N": units.n, "K": units.k}
    consts |= {"FM": tile_m // (across * units.m), "FN": tile_n // (down * units.n), "SM": across, "SN": down}
    return consts | {"LANES": units.lanes}


def usable(units: MatrixUnits) -> bool:
    """Return whether mat_mul_coop supports the matrix size. A matrix must fit the smallest tile, k must
    divide 32, and the results must fit the shared memory that Vulkan guarantees."""
    fits = units.m <= 64 and units.n <= 32 and units.m * units.n <= 1024
    return fits and all(v & (v - 1) == 0 for v in units[1:]) and _TK % units.k == 0


def usable_int8_k(k: int) -> bool:
    return k in (8, 16, 32)
