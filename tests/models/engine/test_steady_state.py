from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import numpy as np
import pytest
from device_sets import DEVICE_SETS, wide
from material import DATA
from oracles.fixture import write
from oracles.heads import with_head
from runners import load_runner

from vkbackend.models.engine.runner.draft_runner import HeadRunner
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.step import Run

pytestmark = pytest.mark.timeout(600)


# The fixture `models` would derive files in each process, so the tests use a file of tests/data.
MODEL = DATA / "stories-narrow-F16.gguf"


def rss_bytes() -> int:
    """Return the process's resident memory in bytes, without memory that malloc can return to the system."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # a function of glibc
        trim(0)
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def decode(runner: Runner, first: int, n: int) -> None:
    for pos in range(first, first + n):
        logits = runner.step([3 + pos % 500], [Run(0, 0, 1, pos)], [0])
        assert np.isfinite(logits).all()


SETS = [p if p.id == "0,0" else wide(p) for p in DEVICE_SETS]
PAIRS = [p for p in DEVICE_SETS if p.id in ("0,0", "0,1")]


@pytest.mark.parametrize("devices", SETS)
def test_decode_allocates_nothing(devices: list[str]) -> None:
    runner = load_runner(MODEL, devices=devices, n_ctx=256)
    meshed = runner.mesh.devices
    decode(runner, 0, 8)
    steps = runner.mesh.steps
    before = [(d.created, dict(d.counts), dict(d.nbytes), len(steps.by_kind)) for d in meshed]
    decode(runner, 8, 60)  # decoding at these positions crosses the ends of two blocks
    assert [(d.created, dict(d.counts), dict(d.nbytes), len(steps.by_kind)) for d in meshed] == before
    runner.close()
    assert all(not d.counts for d in meshed), [d.counts for d in meshed]


@pytest.mark.parametrize("devices", [p if p.id == "0,0" else wide(p) for p in PAIRS])
def test_drafts_of_a_head_allocate_nothing(tmp_path: Path, devices: list[str]) -> None:
    path = write(with_head("glm4moe"), tmp_path / "model.gguf")
    runner = load_runner(path, devices=devices, n_ctx=128, speculation="mtp")
    meshed, steps = runner.mesh.devices, runner.mesh.steps

    def draft(first: int, n: int) -> None:
        for pos in range(first, first + n):
            runner.step([3 + pos % 100], [Run(0, 0, 1, pos)], [0])
            for ahead in (1, 2):
                HeadRunner(runner).draft([5], [0], [pos + ahead])

    draft(0, 8)
    before = [(d.created, dict(d.counts), dict(d.nbytes), len(steps.by_kind)) for d in meshed]
    draft(8, 60)
    assert [(d.created, dict(d.counts), dict(d.nbytes), len(steps.by_kind)) for d in meshed] == before
    runner.close()


# Each case opens 7 models, at 0.2 s per model.
@pytest.mark.own_process
@pytest.mark.parametrize("devices", [p if p.id == "0,0" else wide(p) for p in PAIRS])
def test_open_and_close_does_not_grow(devices: list[str]) -> None:
    def round_trip() -> None:
        runner = load_runner(MODEL, devices=devices, n_ctx=64)
        decode(runner, 0, 2)
        runner.close()
        del runner
        gc.collect()

    sizes, objects = [], []
    for _ in range(7):
        round_trip()
        sizes.append(rss_bytes())
        objects.append(len(gc.get_objects()))
    assert objects[-1] <= objects[2] + 50
    # SwiftShader compiles in its own threads, so a process sometimes needs 10 MB more during a round.
    assert min(sizes[-3:]) <= 1.03 * max(sizes[:3]), sizes


@pytest.mark.own_process
@pytest.mark.wide
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("devices", PAIRS)
def test_ten_thousand_steps_do_not_grow(devices: list[str]) -> None:
    runner = load_runner(MODEL, devices=devices, n_ctx=512)
    meshed = runner.mesh.devices
    for _ in range(3):  # the drivers allocate their pools in these rounds
        decode(runner, 0, 500)
    gc.collect()
    before, counts = rss_bytes(), [(d.created, dict(d.counts), dict(d.nbytes)) for d in meshed]
    for _ in range(20):
        decode(runner, 0, 500)
    gc.collect()
    assert [(d.created, dict(d.counts), dict(d.nbytes)) for d in meshed] == counts
    assert rss_bytes() <= 1.02 * before, f"{before} bytes resident at first, {rss_bytes()} in the end"
    runner.close()
