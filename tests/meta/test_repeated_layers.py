"""A step in which equal layers are recorded once has the same commands as a step of all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from device_sets import covering, wide

from vkbackend import env, hazards
from vkbackend.meta import stores
from vkbackend.meta.recorded_steps import Step
from vkbackend.meta.repeated_layers import WAYS, Repetition, Way, repetitions
from vkbackend.meta.step_kind import StepKind, Wanted
from vkbackend.meta.streams import Fetch
from vkbackend.models.engine.runner import loading
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.options import Options
from vkbackend.recording import Cut, Dispatch, Recording
from vkbackend.repeats import RepeatingRecording
from vkbackend.step import Mix
from vkbackend.tools.measure import synthetic
from vkbackend.tools.measure.simulated import LIMITS, Hollow, SimulatedDevice

pytestmark = pytest.mark.no_vulkan
DENSE = synthetic._dense(9, 256, 8, 4, 32, 768)
SHAPES = {
    "dense": ("llama", 4096, True, DENSE),
    "experts": ("qwen3moe", 4096, False, synthetic._mixture(8, 2, 64, **DENSE)),
}
KINDS = (
    StepKind.of_run(1, 1),
    StepKind.of_run(6, 2),
    StepKind.of_run(16, 1),
    StepKind(16, 4, Mix.BOTH, Wanted(4, summed=True), masked=True),
)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.CACHE, "off")
    for name, shape in SHAPES.items():
        monkeypatch.setitem(synthetic.SHAPES, name, shape)


def opened(name: str, shares: tuple[float, ...], chunk: int | None = None, **more: Any) -> Runner:
    limits = replace(LIMITS, max_allocation_nbytes=chunk) if chunk else LIMITS
    devices = [SimulatedDevice(d, 1 << 40, limits) for d in range(len(shares))]
    names = [device.name for device in devices]
    options = Options.of(
        name,
        devices=names,
        tensor_split=shares,
        n_ctx=256,
        n_ubatch=128,
        n_slots=4,
        use_mmap=False,
        **more,
    )
    return Runner(options, Hollow(f"{name}:f16"), devices=devices)


def compare(runner: Runner, kind: StepKind) -> Step:
    steps = runner.mesh.steps
    step = steps._record(kind)
    steps.repeating = False
    complete = steps._record(kind)
    steps.repeating = True
    assert step.meetings == complete.meetings and step.lag == complete.lag
    assert step.executables[0].n_segments == complete.executables[0].n_segments
    for repeated, every in zip(step.executables, complete.executables, strict=True):
        assert repeated.recording.commands == every.recording.commands
        assert repeated.recording.n_commands == len(every.recording.commands)
        kinds = {hazard.kind for hazard in hazards.check(repeated.recording)}
        assert kinds <= {"in-place"}  # An activation function may write its result over its input.
    return step


def is_repeated(step: Step) -> bool:
    return all(isinstance(executable.recording, RepeatingRecording) for executable in step.executables)


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("dense", (1,)),
        wide(pytest.param("dense", (1, 1, 1, 1))),
        wide(pytest.param("experts", (1,))),
        ("experts", (3, 1)),
    ],
)
def test_repeated_layers_are_those_of_the_complete_model(
    name: str, shares: tuple[float, ...], shapes: None
) -> None:
    runner = opened(name, shares)
    kinds = [*KINDS, *([StepKind.of_run(128, 1, halves=True)] if len(shares) > 1 else [])]
    assert all(is_repeated(compare(runner, kind)) for kind in kinds)


@pytest.mark.parametrize("shares", [wide(pytest.param((1,))), (3, 1)])
def test_layers_with_expert_caches_repeat(
    shares: tuple[float, ...], shapes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers have different slots, tables and counts. Simulated devices cannot fill the slots."""
    for name in ("ExpertSlots", "ExpertCache"):
        monkeypatch.setattr(loading, name, Mock())
    runner = opened("experts", shares, override_tensor=[("_exps", "CPU")], moe_cache_mib=3.0)
    assert all(0 < table.n_slots < table.n_experts for table in runner.layout.tables.values())
    kinds = [*KINDS, *([StepKind.of_run(128, 1, halves=True)] if len(shares) > 1 else [])]
    for kind in kinds:
        step = compare(runner, kind)
        assert is_repeated(step)
        for executable in step.executables:
            lookups = [c for c in executable.recording.accesses() if getattr(c, "op", "") == "moe_lookup"]
            tables = {lookup.args[1] for lookup in lookups if isinstance(lookup, Dispatch)}
            assert len(tables) == DENSE["block_count"] == len(lookups) // (1 + kind.halves)


@pytest.mark.parametrize(
    ("name", "n_ends", "shares"),
    covering(
        [pytest.param("dense", 1, id="dense"), pytest.param("experts", 2, id="experts")], [(1,), (3, 1)]
    ),
)
def test_layers_that_stay_in_the_file_repeat(
    name: str, n_ends: int, shares: tuple[float, ...], shapes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers whose weights stay in the file alternate between two regions of memory. Simulated devices have
    no memory to copy to."""
    monkeypatch.setattr(stores, "Stream", Mock())
    runner = opened(name, shares, n_gpu_layers=0, pinned_mib=0.0)
    for kind in KINDS:
        step = compare(runner, kind)
        assert is_repeated(step)
        fetches = [meeting for meeting in step.meetings if isinstance(meeting, Fetch)]
        assert len(fetches) == DENSE["block_count"] * (n_ends if kind.n_rows < 4 else 1)


def test_cuts_are_those_of_the_complete_model(shapes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vkbackend.recording.SUBMISSION_S", 1e-5)
    step = compare(opened("dense", (1,)), StepKind.of_run(64, 1))
    assert is_repeated(step) and any(isinstance(c, Cut) for c in step.executables[0].recording.commands)


def test_layers_in_different_allocations_repeat(shapes: None) -> None:
    """Some layers contain the end of a memory chunk. Matrices in different chunks are not fused."""
    whole, chunked = opened("dense", (1,)), opened("dense", (1,), chunk=9 << 18)
    for runner in (whole, chunked):
        compare(runner, KINDS[0])

    def ops(runner: Runner) -> list[str]:
        recording = runner.mesh.recorded_step(KINDS[0]).executables[0].recording
        return [c.op for c in recording.accesses() if hasattr(c, "op")]

    assert ops(whole).count("glu") == 0 < ops(chunked).count("glu") < DENSE["block_count"]


def test_a_layer_that_differs_is_recorded(shapes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sixth layer has a different scale, which is a number in the layer's configuration."""
    load = loading.load_model

    def scaled(*how: Any) -> Any:
        model = load(*how)
        layers = list(model.config.layers)  # type: ignore[attr-defined]
        layers[5] = replace(layers[5], scale=0.125)
        model.config = replace(model.config, layers=tuple(layers))  # type: ignore[attr-defined]
        return model

    monkeypatch.setattr(loading, "load_model", scaled)
    step = compare(opened("dense", (1, 1)), KINDS[0])
    scales = [dict(c.push)["scale"] for c in step.executables[0].recording.accesses() if _attends(c)]
    assert scales.count(0.125) == 1 and scales[5] == 0.125


def _attends(command: object) -> bool:
    return getattr(command, "op", "").startswith("attn_decode")


def test_periods_are_found() -> None:
    way = Way(1, 0, 1)
    assert repetitions("aaaaaaaa", way) == [Repetition(1, 1, 1, 7, 0)]
    assert repetitions("abbbbbbb", way) == [Repetition(1, 2, 1, 6, 0)], "a first layer of its own"
    assert repetitions("bbbbbbba", way) == [Repetition(1, 1, 1, 6, 0)], "a last layer of its own"
    assert repetitions("aabaabaabaabaab", way) == [Repetition(1, 1, 3, 4, 0)]
    assert repetitions("aaaaaabbbbbb", way) == [Repetition(1, 1, 1, 5, 0), Repetition(1, 7, 1, 5, 0)]
    assert repetitions("abcdefgh", way) == repetitions("aaa", way) == repetitions("", way) == []
    for way in WAYS:
        for keys in ("a" * 30, "ab" * 15, "aaab" * 8 + "c", "abc" * 9 + "ab"):
            recorded = [il for il in range(len(keys))]
            for repetition in repetitions(keys, way):
                assert repetition.recorded.stop == repetition.skipped.start
                for il in repetition.skipped:
                    recorded.remove(il)
                    assert keys[il] == keys[il - repetition.period]
            assert len(recorded) < len(keys)


def test_a_plain_recording_has_its_commands() -> None:
    assert RepeatingRecording("none", [], []).commands == Recording("none").commands == []
