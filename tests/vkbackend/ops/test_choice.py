"""The matrix ops are chosen per device. Every optional feature can be switched off."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vkbackend import ops
from vkbackend.buffer import Home, View
from vkbackend.limits import Limits
from vkbackend.ops import Recorder
from vkbackend.ops import measured as choices
from vkbackend.ops.matrix import Size, dot_tiles
from vkbackend.recording import Dispatch, Recording
from vkbackend.tools import cli
from vkbackend.tools.measure import matrix_times
from vkbackend.tools.op_cases.quantized import QuantizeQ8
from vkbackend.twins.device import NullDevice

pytestmark = pytest.mark.no_vulkan


PLAIN = frozenset({"subgroup_arithmetic", "full_subgroups", "int_dot"})
ALL = PLAIN | {"buffer_address", "subgroup_shuffle", "matrix_units", "float16"}
LAVAPIPE = Limits(subgroup_size=8, is_cpu=True, features=ALL)
SWIFTSHADER = Limits(subgroup_size=4, is_cpu=True, features=ALL)
GPU = Limits(subgroup_size=32, features=PLAIN)
UNITS = replace(GPU, features=GPU.features | {"matrix_units"})
# The rate of int8 is one or two times the rate of F16 on INTEGERS, and four times on FAST_INTEGERS.
INTEGERS = replace(UNITS, features=UNITS.features | {"int8_units"})
FAST_INTEGERS = replace(INTEGERS, features=INTEGERS.features | {"int8_units_fast"})
FAST_DOTS = replace(GPU, features=GPU.features | {"int_dot_accelerated"})


def both(op: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return ("some", (op,)), ("more", (op,)), ("many", (op,))


def view(*shape: int, dtype: str = "f32") -> View:
    return View(NullDevice("null").buffer(1 << 20, Home.SCRATCH, "x"), 0, shape, dtype)


def chosen(limits: Limits, rows: int, dtype: str = "f32") -> str:
    recording = Recording("choice")
    x = view(rows, 256, dtype=ops.operand_type(limits, rows, dtype))
    Recorder(recording, limits).mat(view(64, 256, dtype=dtype), x, view(rows, 64))
    (dispatch,) = recording.accesses()
    assert isinstance(dispatch, Dispatch)
    return dispatch.op


@pytest.mark.parametrize(
    ("limits", "few", "many"),
    [
        (Limits.floor(), "mat_vec", "mat_mul"),
        (LAVAPIPE, "mat_lane", "mat_lane"),
        (SWIFTSHADER, "mat_vec", "mat_mul"),
        (GPU, "mat_wave", "mat_tile"),
        (replace(GPU, subgroup_size=8), "mat_vec", "mat_tile"),
        (UNITS, "mat_wave", "mat_mul_coop"),
        (replace(UNITS, choices=both("mat_tile")), "mat_wave", "mat_tile"),
        (replace(UNITS, is_cpu=True), "mat_vec", "mat_mul"),
    ],
)
def test_matrix(limits: Limits, few: str, many: str) -> None:
    assert [chosen(limits, rows) for rows in (1, 8)] == [few] * 2
    assert [chosen(limits, rows) for rows in (9, 100)] == [many] * 2


def test_few_rows_with_few_registers() -> None:
    mali = replace(GPU, subgroup_size=16)
    assert [chosen(mali, rows) for rows in (1, 2, 8, 9)] == ["mat_wave", "mat_vec", "mat_vec", "mat_tile"]
    dots = replace(FAST_DOTS, subgroup_size=16)
    assert [chosen(dots, rows, "q8_0") for rows in (1, 2, 9)] == ["mat_dot", "mat_vec", "mat_mul_dot"]
    intel = replace(UNITS, subgroup_size=16)
    assert [chosen(intel, rows) for rows in (1, 2, 8)] == ["mat_wave"] * 3
    assert chosen(replace(mali, batch_invariant=True), 1) == "mat_vec"


@pytest.mark.parametrize(
    ("limits", "off", "then"),
    [
        (LAVAPIPE, "buffer_address", "mat_vec"),
        (LAVAPIPE, "subgroup_shuffle", "mat_vec"),
        (GPU, "subgroup_arithmetic", "mat_vec"),
        (UNITS, "subgroup_arithmetic", "mat_vec"),
    ],
)
def test_without_a_feature(limits: Limits, off: str, then: str) -> None:
    assert chosen(replace(limits, features=limits.features - {off}), 1) == then


@pytest.mark.parametrize(("rows", "grouped"), [(7, False), (8, True), (200, True)])
@pytest.mark.parametrize(
    ("limits", "single", "tiled", "tile"),
    [
        (Limits.floor(), "mat_vec_id", "mat_mul_id", {8: 16, 200: 32}),
        (GPU, "mat_vec_id", "mat_mul_id", {8: 16, 200: 32}),
        (LAVAPIPE, "mat_lane_id", "mat_lane_id", {8: 8, 200: 8}),
        (SWIFTSHADER, "mat_vec_id", "mat_vec_id", {8: 0, 200: 0}),
    ],
)
def test_experts(
    limits: Limits, single: str, tiled: str, tile: dict[int, int], rows: int, grouped: bool
) -> None:
    n_experts, used = 8, 2
    size = ops.tile_size(limits, rows, used, n_experts)
    assert size == (tile[rows] if grouped else 0)
    groups = None
    if size:
        n_tiles = ops.tile_count(rows * used, n_experts, size)
        groups = ops.Groups(view(rows * used, dtype="u32"), view(n_tiles, 3, dtype="u32"), size)
    recording = Recording("choice")
    x, y = view(rows, 64, dtype=ops.experts_operand_type(limits, rows, "f32", groups)), view(rows, used, 32)
    ids, starts = view(rows, used, dtype="u32"), view(n_experts + 1, dtype="u32")
    w = view(32 * n_experts, 64)
    Recorder(recording, limits).mat_id(w, x, ids, starts, y, axis=ops.ROWS, groups=groups)
    (dispatch,) = recording.accesses()
    assert isinstance(dispatch, Dispatch)
    assert dispatch.op == (tiled if grouped else single)


def test_tiles_fit_the_registers() -> None:
    """In narrow subgroups a lane has 128 registers, too few for 8 x 8 values."""
    size = Size(4096, 4096, 512)
    narrow, wide = (replace(GPU, subgroup_size=n) for n in (16, 32))
    assert [dot_tiles(narrow, size).consts["RN"], dot_tiles(wide, size).consts["RN"]] == [4, 8]
    for limits in (narrow, wide):
        cut = dot_tiles(limits, size)
        assert cut.along_x * 8 * cut.consts["RN"] == size.n_rows


def test_experts_use_f16_on_matrix_units() -> None:
    groups = ops.Groups(view(400, dtype="u32"), view(33, 3, dtype="u32"), 32)
    assert ops.experts_operand_type(UNITS, 200, "q4_0", groups) == "f16s"
    assert ops.experts_operand_type(UNITS, 200, "q4_0", replace(groups, tile=24)) == "f32"
    assert ops.experts_operand_type(UNITS, 200, "q4_0", groups, whole_rows=False) == "f32"
    assert ops.experts_operand_type(UNITS, 200, "q4_0") == "f32"
    assert ops.experts_operand_type(UNITS.exact(), 200, "q4_0", groups) == "f32"
    recording = Recording("choice")
    x, y, w = view(200, 64, dtype="f16s"), view(200, 2, 32), view(32 * 8, 64)
    args = view(200, 2, dtype="u32"), view(9, dtype="u32"), y
    Recorder(recording, UNITS).mat_id(w, x, *args, axis=ops.ROWS, groups=groups)
    (dispatch,) = recording.accesses()
    assert isinstance(dispatch, Dispatch) and dispatch.op == "mat_mul_id_coop"


def test_weights_with_int8_codes_use_8_bit_activations() -> None:
    fast = "mat_dot", "mat_dot", "mat_mul_dot"
    assert tuple(chosen(FAST_DOTS, rows, "q4_0") for rows in (1, 8, 9)) == fast
    plain = "mat_wave", "mat_wave", "mat_tile"
    assert tuple(chosen(FAST_DOTS, rows) for rows in (1, 8, 9)) == plain
    assert tuple(chosen(GPU, rows, "q4_0") for rows in (1, 8, 9)) == plain
    for off in ("int_dot", "int_dot_accelerated"):
        without = replace(FAST_DOTS, features=FAST_DOTS.features - {off})
        assert tuple(chosen(without, rows, "q4_0") for rows in (1, 8, 9)) == plain


def test_few_rows_use_dot_products_instead_of_matrix_units() -> None:
    both_kinds = replace(UNITS, features=UNITS.features | FAST_DOTS.features)
    names = [chosen(both_kinds, rows, "q4_0") for rows in (9, 16, 17)]
    assert names == ["mat_mul_dot", "mat_mul_dot", "mat_mul_coop"]
    assert chosen(both_kinds, 9, "f16") == "mat_mul_coop"
    amd = replace(both_kinds, subgroup_size=64)
    names = [chosen(amd, rows, "q4_0") for rows in (9, 32, 33)]
    assert names == ["mat_mul_dot", "mat_mul_dot", "mat_mul_coop"]
    assert chosen(amd, 32, "f16") == "mat_mul_coop"
    assert chosen(both_kinds.exact(), 9, "q4_0") == "mat_tile"


def test_int8_matrix_units_are_used_if_four_times_as_fast() -> None:
    assert [chosen(FAST_INTEGERS, rows, "q4_0") for rows in (8, 9)] == ["mat_wave", "mat_mul_dot_coop"]
    for dtype in ("q6_k", "f16"):
        assert chosen(FAST_INTEGERS, 9, dtype) == "mat_mul_coop"
    assert chosen(INTEGERS, 9, "q4_0") == "mat_mul_coop"
    assert chosen(replace(INTEGERS, choices=both("mat_mul_dot_coop")), 9, "q4_0") == "mat_mul_dot_coop"
    assert chosen(FAST_INTEGERS.exact(), 9, "q4_0") == "mat_tile"
    without = replace(FAST_INTEGERS, features=FAST_INTEGERS.features - {"int8_units"})
    assert chosen(without, 9, "q4_0") == "mat_mul_coop"
    groups = ops.Groups(view(400, dtype="u32"), view(33, 3, dtype="u32"), 32)
    assert ops.experts_operand_type(FAST_INTEGERS, 200, "q4_0", groups) == "f16s"


def test_experts_use_8_bit_activations_like_other_matrices() -> None:
    measured = (("one", ("mat_dot",)), *both("mat_mul_dot"))
    for limits, wanted in ((FAST_DOTS, "q8"), (GPU, "f32"), (replace(GPU, choices=measured), "q8")):
        types = {ops.experts_operand_type(limits, n, dtype) for n, dtype in ((1, "q4_0"), (9, "mxfp4"))}
        assert types == {wanted}
        assert ops.experts_operand_type(limits, 1, "f16") == "f32"
        assert ops.experts_operand_type(limits.exact(), 1, "q4_0") == "f32"


# ---- measured choices ----


def test_measured_choices_precede_the_defaults() -> None:
    measured = (("one", ("mat_lane",)), *both("mat_lane"))
    swift = replace(SWIFTSHADER, choices=measured)
    assert [chosen(swift, rows) for rows in (1, 2, 8, 9)] == ["mat_lane", "mat_vec", "mat_vec", "mat_lane"]
    unable = replace(swift, features=frozenset())
    assert [chosen(unable, rows) for rows in (1, 9)] == ["mat_vec", "mat_mul"]


def test_default_op_is_replaced_only_by_clearly_faster_ops() -> None:
    def times(**us: float) -> matrix_times.Times:
        return {
            name: {op: {"f16": us[op]} for op in ops_ if op in us}
            for name, ops_ in choices.CANDIDATES.items()
        }

    first = times(mat_vec=10.0, mat_wave=9.5, mat_mul=10.0, mat_lane=5.0)
    other = times(mat_vec=10.0, mat_wave=9.1, mat_mul=1.0, mat_lane=14.8)
    assert matrix_times.ranked([first], SWIFTSHADER)["one"] == ("mat_lane", "mat_vec", "mat_wave")
    assert matrix_times.ranked([first], SWIFTSHADER)["many"] == ("mat_lane", "mat_mul")
    assert matrix_times.ranked([first, other], SWIFTSHADER)["one"] == ("mat_vec", "mat_wave", "mat_lane")
    assert matrix_times.ranked([first, other], SWIFTSHADER)["many"] == ("mat_mul", "mat_lane")


def test_ops_are_compared_by_their_common_types() -> None:
    slow = {"one": {"mat_wave": {"f16": 30.0, "q8_0": 20.0}, "mat_dot": {"q8_0": 19.0}}}
    assert matrix_times.ranked([slow], GPU)["one"] == ("mat_wave", "mat_dot")
    fast = {"one": {"mat_wave": {"f16": 30.0, "q8_0": 20.0}, "mat_dot": {"q8_0": 17.0}}}
    table = matrix_times.ranked([fast], GPU)
    assert table == {"one": ("mat_dot", "mat_wave")}
    measured = replace(GPU, choices=tuple(table.items()))
    assert [chosen(measured, 1, dtype) for dtype in ("q8_0", "f32")] == ["mat_dot", "mat_wave"]


def test_tune_includes_the_time_to_round_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(device: object, case: object, *_: object) -> SimpleNamespace:
        return SimpleNamespace(us_cpu=None, us_min=7.0 if isinstance(case, QuantizeQ8) else 100.0)

    monkeypatch.setattr(matrix_times, "time_case", timed)
    device: Any = SimpleNamespace(limits=FAST_DOTS)
    times = matrix_times.times_of(device)
    assert times["one"]["mat_dot"]["q4_0"] == pytest.approx(len(matrix_times.SHAPES) * (100 + 7 * 4 / 7))
    assert times["one"]["mat_vec"]["q4_0"] == len(matrix_times.SHAPES) * 100


def test_tune_refuses_numpy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "-dev", "numpy"]) == 2
    assert "give one of" in capsys.readouterr().err


def test_verify_refuses_numpy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "-dev", "numpy"]) == 2
    assert "pass one of" in capsys.readouterr().err
