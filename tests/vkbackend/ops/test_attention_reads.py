"""Count how often attn_decode reads K and V for 8 rows of one sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vkbackend.buffer import Home, View
from vkbackend.limits import Limits, MatrixUnits
from vkbackend.ops import Recorder, heads_by_units
from vkbackend.recording import Dispatch, Recording
from vkbackend.tools.measure.simulated import LIMITS
from vkbackend.twins.device import NullDevice

pytestmark = pytest.mark.no_vulkan

N_ROWS, N_KV, HEAD = 8, 2, 128
NVIDIA = replace(LIMITS, subgroup_size=32, max_shared_nbytes=49_152, matrix_units=MatrixUnits())
INTEL = replace(LIMITS, subgroup_size=16, matrix_units=MatrixUnits("khr", 8, 16, 16, 16))


def reads(limits: Limits, group: int, run_rows: int) -> float:
    """Return the number of workgroups that read a key. The rows belong to one run, which does not cross a
    border between blocks."""
    buffer = NullDevice("null").buffer(1 << 24, Home.SCRATCH, "x")
    q, out = (View(buffer, 0, (N_ROWS, N_KV * group, HEAD)) for _ in range(2))
    k, v = (View(buffer, 0, (64, N_KV * HEAD), "f16") for _ in range(2))
    cells, step = View(buffer, 0, (1, 2), "u32"), View(buffer, 0, (64,), "u32")
    recording = Recording("reads")
    recorder = Recorder(recording, limits)
    by_units = heads_by_units(limits, group, HEAD, HEAD)
    attend = recorder.attn_decode_coop if by_units else recorder.attn_decode
    attend(q, k, v, cells, out, step, scale=1.0, run_rows=run_rows)
    (d,) = (c for c in recording.accesses() if isinstance(c, Dispatch))
    rows, heads, splits = d.groups
    assert (rows, splits) == (N_ROWS, 1)
    return rows / dict(d.consts)["ROWS"] * heads / N_KV


@pytest.mark.parametrize(
    ("limits", "few", "groups"),
    [
        (Limits.floor(), [1, 2, 4, 8], (1, 2, 4, 8)),
        (INTEL, [1, 2, 4, 8], (1, 2, 4, 8)),
        (LIMITS, [1, 2, 1, 1], (1, 2, 4, 8)),
        (NVIDIA, [1, 2, 1, 1], (1, 2, 4, 8)),
        (NVIDIA.exact(), [1, 2, 4, 8, 16], (1, 2, 4, 8, 16)),
    ],
    ids=["floor", "intel", "amd", "nvidia", "nvidia exact"],
)
def test_reads_of_eight_rows(limits: Limits, few: list[int], groups: tuple[int, ...]) -> None:
    assert [reads(limits, group, N_ROWS) for group in groups] == few
    alone = [max(8, group) if "exact" else 8 for group in groups]
    assert [reads(limits, group, 1) for group in groups] == alone
