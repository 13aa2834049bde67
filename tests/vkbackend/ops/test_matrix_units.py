"""These tests cover the choice of a size of matrix units, and the tiles of products."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vkbackend import ops, shaderlib, twins
from vkbackend.formats import dequantize, row_nbytes
from vkbackend.limits import Limits, MatrixUnits
from vkbackend.ops.matrix import Size
from vkbackend.ops.units import coop_tile, int8_tiles_of_units, usable
from vkbackend.vulkan import cooperative
from vkbackend.vulkan.capabilities import has_fast_int8_units
from vkbackend.vulkan.device import usable_units

pytestmark = pytest.mark.no_vulkan


# Sizes of matrix units for F16 and int8 that NVIDIA, AMD RDNA3, two Intel GPUs and lavapipe report.
REPORTED = {
    "nvidia": ([(16, 16, 16), (16, 8, 16), (16, 8, 8)], [(16, 8, 16), (16, 16, 32), (8, 8, 16)], 32),
    "amd": ([(16, 16, 16)], [(16, 16, 16)], 64),
    "intel dg2": ([(8, 8, 16)], [(8, 8, 32)], 8),
    "intel bmg": ([(8, 16, 16)], [(8, 16, 32)], 16),
    "lavapipe": ([(8, 8, 8)], [(8, 8, 8)], 8),
}
UNITS = {
    name: cooperative.best("khr", halves, lanes, ints) for name, (halves, ints, lanes) in REPORTED.items()
}


def test_the_usual_size_comes_first() -> None:
    assert UNITS["nvidia"] == MatrixUnits("khr", 16, 16, 16, 32, int8_k=32)
    assert UNITS["intel bmg"] == MatrixUnits("khr", 8, 16, 16, 16, int8_k=32)
    assert cooperative.best("nv", [(16, 8, 8), (16, 8, 16)], 32) == MatrixUnits("nv", 16, 8, 16, 32)
    assert cooperative.best("khr", [], 32) is None


@pytest.mark.parametrize(
    ("api", "integers", "k"),
    [
        ("khr", [(16, 16, 16), (16, 16, 32)], 32),
        # k = 64 exceeds a block of 32, and F16 has no tile with n = 8.
        ("khr", [(16, 16, 64), (16, 8, 32)], 0),
        ("khr", [], 0),
        ("nv", [(16, 16, 32)], 0),
    ],
)
def test_int8_uses_the_tiles_of_f16(api: str, integers: list[tuple[int, int, int]], k: int) -> None:
    assert cooperative.best(api, [(16, 16, 16)], 32, integers) == MatrixUnits(api, int8_k=k)


def test_int8_is_the_default_only_on_geforce() -> None:
    assert has_fast_int8_units("NVIDIA GeForce RTX 4090") and has_fast_int8_units("NVIDIA H100 80GB HBM3")
    for name in (
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA RTX A6000",
        "AMD Radeon RX 9070 XT",
        "Intel(R) Arc(TM) B580",
    ):
        assert not has_fast_int8_units(name)


@pytest.mark.parametrize("size", [(64, 64, 16), (16, 16, 64), (16, 12, 16), (32, 64, 16)])
def test_unusable_sizes_are_not_chosen(size: tuple[int, int, int]) -> None:
    assert not usable(MatrixUnits("khr", *size))
    assert cooperative.best("khr", [size, (8, 8, 8)], 32) == MatrixUnits("khr", 8, 8, 8, 32)


@pytest.mark.parametrize(("lanes", "choice", "used"), [(32, False, True), (8, True, True), (8, False, False)])
def test_units_of_other_subgroup_sizes_need_size_control(
    lanes: int, choice: bool, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shaderlib, "is_available", lambda *_: True)
    able = dict.fromkeys((*cooperative.BESIDES, "cooperative_matrix"), True)
    units = MatrixUnits("khr", lanes=lanes)
    info = SimpleNamespace(matrix_units=(units,), limits={"subgroup_size": 32})
    probe: Any = info
    usable = usable_units(probe, "probe", able | {"subgroup_size_control": choice})
    assert usable == (units if used else None)


@pytest.mark.parametrize("units", UNITS.values(), ids=UNITS)
@pytest.mark.parametrize("limits", [Limits(), Limits(max_invocations=1024, max_shared_nbytes=49_152)])
@pytest.mark.parametrize(
    ("n", "rows"),
    [(1, 1), (64, 33), (64, 96), (4096, 32), (4096, 96), (4096, 512), (14_336, 65), (14_336, 97)],
)
def test_tiles_are_multiples_of_matrices_within_limits(
    units: MatrixUnits, limits: Limits, n: int, rows: int
) -> None:
    tile_m, tile_n, across, down = coop_tile(replace(limits, matrix_units=units), n, rows)
    assert tile_m % (units.m * across) == 0 == tile_n % (units.n * down)
    assert across * down * units.lanes <= limits.max_invocations
    assert (tile_m + tile_n) * 80 + 4 * across * down * units.m * units.n <= limits.max_shared_nbytes
    sums = tile_m * tile_n // (across * down * units.lanes)
    assert units.lanes > 16 or sums <= 32 or across * down * units.lanes * 2 > limits.max_invocations
    grid = int8_tiles_of_units(replace(limits, matrix_units=units), Size(n, 4096, rows))
    c, slice_nbytes = grid.consts, 80 if units.lanes > 16 else 48
    assert 32 % c["K"] == 0 and c["LOCAL"] == c["SM"] * c["SN"] * units.lanes <= limits.max_invocations
    w_rows, x_rows = c["M"] * c["FM"] * c["SM"], c["N"] * c["FN"] * c["SN"]
    assert grid.along_w * w_rows >= n and grid.along_x * x_rows >= rows
    floats = (w_rows + x_rows) * (4 if units.lanes > 16 else 2) + c["SM"] * c["SN"] * units.m * units.n
    assert (w_rows + x_rows) * slice_nbytes + 4 * floats <= limits.max_shared_nbytes
    largest = limits.max_invocations > 128 and rows > 64 and -(-n // 128) * -(-rows // 128) >= 64
    usual = (128, 128) if largest else (64, 64) if rows > 32 else (64, 32)
    # Tiles of 96 rows replace two tiles of 64 rows, or one of 128 rows.
    of_96 = units.lanes > 16 and n >= 4096 and 64 < rows <= 96
    of_96 &= (64 + 96) * 80 + 4 * across * down * units.m * units.n <= limits.max_shared_nbytes
    assert (tile_m, tile_n) == ((64, 96) if of_96 else usual)


HEADS = {(64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (288, 256), (512, 512), (576, 512)}
ATTENDS = {  # in narrow subgroups, heads of 80 or 256 cannot be divided into parts that fit the registers
    "nvidia": HEADS,
    "amd": HEADS,
    "intel dg2": {(64, 64), (128, 128), (192, 128), (288, 256)},
    "intel bmg": {(64, 64), (128, 128), (192, 128), (288, 256)},
    "lavapipe": {(64, 64), (128, 128), (192, 128), (288, 256)},
}


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("heads", sorted(HEADS))
def test_attention_requires_heads_that_are_multiples_of_matrices(name: str, heads: tuple[int, int]) -> None:
    units, needs = UNITS[name], frozenset(ops.OPS["attn_prefill_coop"].needs)
    gpu = Limits(max_invocations=1024, max_shared_nbytes=49_152, features=needs, matrix_units=units)
    tile = ops.tile_of_units(gpu, 512, *heads)
    assert (heads in ATTENDS[name]) == ops.attends_by_units(gpu, 512, *heads)
    assert (tile is not None) == (heads in ATTENDS[name] or max(heads) > 256)
    assert not ops.attends_by_units(gpu.exact(), 512, *heads)
    assert not ops.attends_by_units(replace(gpu, is_cpu=True), 512, *heads)
    if tile:
        few, consts = ops.tile_of_units(gpu, 5, *heads), tile.consts
        assert few and few.rows == units.m and tile.rows % units.m == 0
        assert tile.rows >= 2 * units.m or max(heads) > 256
        assert heads[0] % (consts["K_CHUNKS"] * consts["DIM_PARTS"] * units.k * consts["UNROLL"]) == 0
        assert heads[1] % (consts["V_CHUNKS"] * units.n * consts["V_PARTS"]) == 0
        sums = heads[1] // consts["V_PARTS"] * units.m // units.lanes
        assert sums <= (32 if units.lanes <= 16 else 64) or heads not in ATTENDS[name]


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16, 24])
def test_heads_of_a_group_decode_as_rows(name: str, group: int) -> None:
    """If subgroups are wide and groups have at least four heads, decoding uses matrix units, with one row per
    head."""
    units, needs = UNITS[name], frozenset(ops.OPS["attn_decode_coop"].needs)
    assert units
    gpu = Limits(max_invocations=1024, max_shared_nbytes=49_152, features=needs, matrix_units=units)
    rows = ops.heads_by_units(gpu, group, 128, 128)
    assert bool(rows) == (group >= 4 and units.lanes >= 32)
    assert not rows or group <= rows < max(2 * group, units.m + 1)
    for other in (gpu.exact(), replace(gpu, is_cpu=True), replace(gpu, features=frozenset())):
        assert not ops.heads_by_units(other, group, 128, 128)
    assert bool(ops.heads_by_units(gpu, group, 576, 512)) == bool(rows)
    tile = ops.tile_of_units(gpu, group, 256, 256, "attn_decode_coop")
    if units.lanes >= 32:
        assert tile and 32 * 512 // 8 <= 24 * tile.consts["LOCAL"]


@pytest.mark.parametrize("span", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_scaled_f16_covers_every_magnitude(span: float) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((5, 300)) * span).astype(np.float32)
    x[:, 0] *= 1000
    raw = np.zeros((5, row_nbytes("f16s", 300)), np.uint8)
    twins.half.pack_f16(x, raw, k=300, n_rows=5)
    w = rng.standard_normal((300, 64))
    got, want = dequantize(raw.reshape(-1), "f16s", x.shape).astype(np.float64) @ w, x.astype(np.float64) @ w
    assert np.sum((got - want) ** 2) / np.sum(want**2) < 1e-7


def test_operands_by_op() -> None:
    floor = Limits(subgroup_size=32)
    units = replace(floor, features=frozenset(ops.OPS["mat_mul_coop"].needs))
    assert [ops.operand_type(units, rows, "q4_0") for rows in (1, 8, 9)] == ["f32", "f32", "f16s"]
    assert ops.operand_type(floor, 9, "q4_0") == "f32"
