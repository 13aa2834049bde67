"""Which op a matrix runs on, by what the device can do; every optional feature has its off switch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vkbackend import ops
from vkbackend.buffer import Home, View
from vkbackend.executors import NullDevice
from vkbackend.limits import Limits
from vkbackend.recording import Dispatch, Recording
from vkbackend.tools import cli, tune

ALL = frozenset(name for spec in ops.OPS.values() for name in spec.needs)
LAVAPIPE = Limits(subgroup_size=8, is_cpu=True, features=ALL)
SWIFTSHADER = Limits(subgroup_size=4, is_cpu=True, features=ALL)
GPU = Limits(subgroup_size=32, features=ALL - {"buffer_address"})


def view(*shape: int, dtype: str = "f32") -> View:
    return View(NullDevice("null").buffer(1 << 20, Home.SCRATCH, "x"), 0, shape, dtype)


def chosen(limits: Limits, rows: int) -> str:
    recording = Recording("choice")
    ops.mat(recording, limits, view(64, 64), view(rows, 64), view(rows, 64))
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
    ],
)
def test_matrix(limits: Limits, few: str, many: str) -> None:
    assert [chosen(limits, rows) for rows in (1, 8)] == [few] * 2
    assert [chosen(limits, rows) for rows in (9, 100)] == [many] * 2


@pytest.mark.parametrize(
    ("limits", "off", "then"),
    [
        (LAVAPIPE, "buffer_address", "mat_vec"),
        (LAVAPIPE, "subgroup_shuffle", "mat_vec"),
        (GPU, "subgroup_arithmetic", "mat_vec"),
    ],
)
def test_without_a_feature(limits: Limits, off: str, then: str) -> None:
    assert chosen(replace(limits, features=limits.features - {off}), 1) == then


@pytest.mark.parametrize(("rows", "grouped"), [(7, False), (8, True), (200, True)])
@pytest.mark.parametrize(
    ("limits", "single", "tiled", "tile"),
    [
        (Limits.floor(), "mat_vec_id", "mat_mul_id", {8: 16, 200: 32}),
        (LAVAPIPE, "mat_lane_id", "mat_lane_id", {8: 8, 200: 8}),
        (SWIFTSHADER, "mat_vec_id", "mat_vec_id", {8: 0, 200: 0}),
    ],
)
def test_experts(
    limits: Limits, single: str, tiled: str, tile: dict[int, int], rows: int, grouped: bool
) -> None:
    n_experts, used = 8, 2
    size = ops.tile_size(limits, rows * used, n_experts)
    assert size == (tile[rows] if grouped else 0)
    groups = None
    if size:
        n_tiles = ops.tile_count(rows * used, n_experts, size)
        groups = ops.Groups(view(rows * used, dtype="u32"), view(n_tiles, 3, dtype="u32"), size)
    recording = Recording("choice")
    x, y = view(rows, 64), view(rows, used, 32)
    ids, starts = view(rows, used, dtype="u32"), view(n_experts + 1, dtype="u32")
    w = view(32 * n_experts, 64)
    ops.mat_id(recording, limits, w, x, ids, starts, y, axis=ops.ROWS, groups=groups)
    (dispatch,) = recording.accesses()
    assert isinstance(dispatch, Dispatch)
    assert dispatch.op == (tiled if grouped else single)


# ---- measured choices ----


def test_what_was_measured_comes_before_the_rules() -> None:
    measured = (("one", "mat_lane"), ("many", "mat_lane"))
    swift = replace(SWIFTSHADER, choices=measured)
    assert [chosen(swift, rows) for rows in (1, 2, 8, 9)] == ["mat_lane", "mat_vec", "mat_vec", "mat_lane"]
    unable = replace(swift, features=frozenset())
    assert [chosen(unable, rows) for rows in (1, 9)] == ["mat_vec", "mat_mul"]


def test_the_rules_op_stays_unless_another_is_clearly_faster() -> None:
    times = {"one": {"mat_vec": 10.0, "mat_wave": 9.5}, "many": {"mat_mul": 10.0, "mat_lane": 5.0}}
    other = {"one": {"mat_vec": 10.0, "mat_wave": 9.0}, "many": {"mat_mul": 1.0, "mat_lane": 4.8}}
    assert tune.winners([times], SWIFTSHADER) == {"one": "mat_vec", "many": "mat_lane"}
    assert tune.winners([times, other], SWIFTSHADER) == {"one": "mat_vec", "many": "mat_lane"}
    assert tune.winners([other], SWIFTSHADER) == {"one": "mat_vec", "many": "mat_mul"}


def test_tune_takes_devices_of_one_driver(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "-dev", "numpy"]) == 2
    assert "give one of" in capsys.readouterr().err


def test_verify_takes_devices_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "-dev", "numpy"]) == 2
    assert "give one of" in capsys.readouterr().err
