"""An idle engine records steps that are likely next. A request interrupts the recording, and its answer has
the same bits."""

from __future__ import annotations

from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest
from runners import load_runner

from vkbackend.meta.sizing import StepShape
from vkbackend.meta.step_kind import StepKind, Wanted
from vkbackend.models.engine.runner.likely_steps import likely_kinds
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.step import Mix, Run

LAYOUTS = "VkPipelineLayout", "VkDescriptorSetLayout"
SHAPE = StepShape(64, 16, ((0, 100),), n_slots=8)


def open_runner(models: Path, devices: list[str]) -> Runner:
    options = {"n_ctx": 64, "n_slots": 2, "n_ubatch": 16}
    return load_runner(models / "stories-narrow-F32.gguf", devices=devices, **options)


def logits(runner: Runner) -> list[np.ndarray]:
    first = runner.step([5, 7, 9], [Run(0, 0, 3, 0)], [2]).copy()
    return [first, runner.step([3], [Run(0, 0, 1, 3)], [0]).copy()]


def counts(runner: Runner) -> dict[str, int]:
    """Return the numbers of live objects. Pipelines are excluded, because a device keeps them."""
    counted = {**runner.mesh.devices[0].counts}
    return {kind: n for kind, n in counted.items() if kind not in ("VkPipeline", *LAYOUTS)}


@pytest.mark.no_vulkan
def test_a_new_server_gets_decoding_steps_and_prompts() -> None:
    kinds = list(dict.fromkeys(likely_kinds([], SHAPE, 8, 0)))
    assert kinds[:4] == [StepKind(n, n, Mix.DECODE) for n in (1, 2, 4, 8)]
    assert kinds[4] == StepKind.of_run(64, 1)
    one, all_slots = ([StepKind.of_run(n, k) for n in (64, 48, 32, 24, 16, 12)] for k in (1, 8))
    together = [StepKind(n, 8, Mix.BOTH) for n in (16, 32, 64)]
    few = [StepKind(n, k, Mix.FEW) for n, k in ((2, 1), (4, 4), (8, 8))]
    assert kinds[4:22] == one + all_slots + together + few, "the clients of all slots may ask at once"
    assert all(kind.n_rows <= 64 and kind.n_outputs <= 8 for kind in kinds)
    assert len(kinds) < 64


@pytest.mark.no_vulkan
def test_steps_beside_the_latest_step_come_first() -> None:
    latest = StepKind(24, 4, Mix.BOTH, Wanted(32))
    first = list(likely_kinds([latest], SHAPE, 8, 32))[:9]
    assert {(kind.n_rows, kind.n_outputs) for kind in first} == {
        (r, o) for r in (16, 24, 32) for o in (2, 4, 8)
    }
    assert all(kind.wanted == latest.wanted and kind.mix is Mix.BOTH for kind in first)


@pytest.mark.no_vulkan
def test_requests_wait_for_no_recording_after_steps_were_recorded_ahead(models: Path) -> None:
    runner, other = (open_runner(models, ["numpy", "numpy"]) for _ in range(2))
    while runner.record_ahead(lambda: False):
        pass
    n_ahead = len(runner.mesh.steps.by_kind)
    assert n_ahead > 6 and runner.n_recorded == 0
    prompt = runner.step([1] * 9, [Run(0, 0, 9, 0)], [8]).copy()
    assert np.array_equal(prompt, other.step([1] * 9, [Run(0, 0, 9, 0)], [8]))
    runner.step([3, 4], [Run(0, 0, 1, 9), Run(1, 1, 1, 0)], [0, 1])
    assert runner.n_recorded == 0 and len(runner.mesh.steps.by_kind) == n_ahead
    for some in (runner, other):
        some.close()


def test_a_request_stops_the_recording(models: Path) -> None:
    """The request arrives each time that a recording checks for requests."""
    runner = open_runner(models, ["0"])
    want = logits(runner)
    objects = counts(runner)
    n, recorded = 0, False
    while not recorded:
        answers = chain(repeat(False, n), repeat(True))
        known = set(runner.mesh.steps.by_kind)
        assert runner.record_ahead(lambda answers=answers: next(answers))  # type: ignore[misc]
        recorded = set(runner.mesh.steps.by_kind) > known
        assert recorded or counts(runner) == objects
        n += 1
    assert n > 5
    for got, expected in zip(logits(runner), want, strict=True):
        assert np.array_equal(got, expected)
    runner.close()
