"""When index_scores and index_maxima run on matrix units, and their tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vkbackend.buffer import Home, View
from vkbackend.limits import Limits, MatrixUnits
from vkbackend.ops import OPS, Recorder, maxima_by_units, scores_by_units
from vkbackend.ops.indexer import maxima_tile, score_tile
from vkbackend.recording import Dispatch, Recording
from vkbackend.twins.device import NullDevice

pytestmark = pytest.mark.no_vulkan

NEEDS = frozenset(OPS["index_scores_coop"].needs)
ALL = {name for name, op in OPS.items() if "matrix_units" in op.needs}
NVIDIA = Limits(1024, 49_152, features=NEEDS)
AMD = replace(NVIDIA, max_shared_nbytes=65_536, matrix_units=MatrixUnits(lanes=64))
INTEL = replace(NVIDIA, matrix_units=MatrixUnits("khr", 8, 16, 16, 16))
LAVAPIPE = Limits(1024, 32_768, features=NEEDS, matrix_units=MatrixUnits("khr", 8, 8, 8, 8))


@pytest.mark.parametrize("limits", [NVIDIA, AMD, INTEL, LAVAPIPE], ids=["nvidia", "amd", "intel", "lavapipe"])
@pytest.mark.parametrize("n_heads", [1, 8, 17, 64, 100])
@pytest.mark.parametrize("head", [32, 128, 256])
def test_tiles_fit(limits: Limits, n_heads: int, head: int) -> None:
    tile, units = score_tile(limits, n_heads, head), limits.matrix_units
    assert tile and tile["LOCAL"] == tile["KEY_GROUPS"] * tile["HEAD_GROUPS"] * units.lanes
    keys = tile["KEY_GROUPS"] * tile["FN"] * units.n
    heads = tile["HEAD_GROUPS"] * tile["FH"] * units.m
    halves = (keys + heads) * (head + 8)
    floats = keys + heads * units.n + tile["HEAD_GROUPS"] * keys * units.m
    assert 2 * halves + 4 * floats <= limits.max_shared_nbytes
    assert heads < n_heads + 2 * units.m  # at most one matrix without heads per subgroup


def test_gpus_score_on_matrix_units() -> None:
    for limits in (NVIDIA, AMD, INTEL):
        assert scores_by_units(limits, 64, 128) and scores_by_units(limits, 4, 32)
        assert not scores_by_units(limits, 3, 128) and not scores_by_units(limits, 64, 40)
        for other in (limits.exact(), replace(limits, is_cpu=True), replace(limits, features=frozenset())):
            assert not scores_by_units(other, 64, 128)


@pytest.mark.parametrize("limits", [NVIDIA, AMD, INTEL, LAVAPIPE], ids=["nvidia", "amd", "intel", "lavapipe"])
@pytest.mark.parametrize("n_heads", [1, 4, 17])
@pytest.mark.parametrize(("head", "block"), [(32, 64), (128, 128), (256, 192)])
def test_tiles_of_maxima_divide_blocks(limits: Limits, n_heads: int, head: int, block: int) -> None:
    tile, units = maxima_tile(limits, n_heads, head, block, 1), limits.matrix_units
    assert tile and tile["LOCAL"] == units.lanes and tile["HEADS"] <= units.m
    keys = tile["FN"] * units.n
    assert block % keys == keys % 32 == 0
    assert 2 * (keys + units.m) * (head + 8) + 4 * units.m * units.n <= limits.max_shared_nbytes
    assert maxima_by_units(limits, n_heads, head, block, 1)
    assert not maxima_by_units(limits, n_heads, head, block, 0), "the row's own block would be scored"
    assert not maxima_by_units(limits, n_heads, head, 8, 1)


def test_pipelines_have_the_units_subgroup_size() -> None:
    """The constant LANES sets it. The matrix units of Arc A need subgroups of 8, but its default is 16."""
    assert "index_maxima_coop" in ALL and not [name for name in ALL if "LANES" not in OPS[name].consts]


@pytest.mark.parametrize(
    ("n_rows", "n_blocks", "rows"), [(1, 1024, 1), (8, 256, 1), (512, 8, 2), (512, 128, 8)]
)
def test_prompts_read_keys_once_for_several_rows(n_rows: int, n_blocks: int, rows: int) -> None:
    """A workgroup scores 64 positions."""
    buffer = NullDevice("null").buffer(1 << 30, Home.SCRATCH, "x")
    recording = Recording("reads")
    q, w = View(buffer, 0, (n_rows, 64, 128)), View(buffer, 0, (n_rows, 64))
    k, cells = View(buffer, 0, (32 * n_blocks, 128), "f16"), View(buffer, 0, (1, n_blocks), "u32")
    y, step = View(buffer, 0, (n_rows, 32 * n_blocks)), View(buffer, 0, (1 << 20,), "u32")
    Recorder(recording, NVIDIA).index_scores_coop(q, w, k, cells, y, step)
    (d,) = (c for c in recording.accesses() if isinstance(c, Dispatch))
    assert d.groups == (n_blocks // 2, 1, n_rows // rows) and dict(d.consts)["ROWS"] == rows
