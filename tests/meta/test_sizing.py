"""If several devices are equal, memory is planned for only one of them. The result is the same as if memory
were planned for all devices."""

from __future__ import annotations

from itertools import count

import pytest
from device_sets import covering, only, product, some

from vkbackend.meta import sizing
from vkbackend.meta.graph import Graph
from vkbackend.meta.sizing import StepShape, StepSizes, step_kinds
from vkbackend.meta.step_kind import bucket, mix_of
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.options import Options
from vkbackend.models.placement import traced_steps
from vkbackend.models.placement.layout import lay_out
from vkbackend.models.placement.traced_steps import REPEATS, repeating, step_shape, step_sizes
from vkbackend.step import Mix
from vkbackend.tools.measure import synthetic
from vkbackend.tools.measure.simulated import LIMITS, Hollow

pytestmark = pytest.mark.no_vulkan
SHARES = [pytest.param(shares, id=str(shares)) for shares in ((1,), (3, 1), (1, 1, 1))]
DENSE = synthetic._dense(3, 256, 8, 4, 32, 768)
SHAPES = {
    "dense": ("llama", 4096, True, DENSE),
    "experts": ("qwen3moe", 4096, False, synthetic._mixture(8, 2, 64, **DENSE)),
}


def sizes_of(name: str, shares: tuple[float, ...], halves: bool) -> StepSizes:
    options = Options.of(name, devices=["0"] * len(shares), tensor_split=shares, n_ubatch=128, n_slots=16)
    gguf = Hollow(f"{name}:f16")
    model, types = load_model(gguf), {key: info.type for key, info in gguf.tensors.items()}
    types.setdefault("output.weight", "f16")
    layout = lay_out(model, types, len(shares), options)
    shape = step_shape(model, layout, options, 128, halves)
    return step_sizes(model, layout, options, [LIMITS] * len(shares), shape)


@pytest.mark.parametrize(
    ("shares", "name", "halves"),
    some(covering([(1,), (1, 1, 1, 1), (3, 1, 3, 1), (1, 1, 0)], product(SHAPES, [False, True])), 5),
)
def test_alike_devices_are_planned_once(
    name: str, shares: tuple[float, ...], halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(synthetic.SHAPES, name, SHAPES[name])
    planned = []
    true = sizing.plan_scratch
    monkeypatch.setattr(sizing, "plan_scratch", lambda *how: planned.append(how) or true(*how))
    sizes, n_planned = sizes_of(name, shares, halves), len(planned)
    planned.clear()
    numbers = count()
    monkeypatch.setattr(sizing, "form_of", lambda recording: (next(numbers),))
    assert sizes_of(name, shares, halves) == sizes
    assert (n_planned < len(planned)) == (len(set(shares)) < len(shares))


@pytest.mark.parametrize("n_slots", [1, 2, 7, 12, 40])
def test_steps_of_every_mix_are_planned(n_slots: int) -> None:
    n_ubatch = 32
    kinds = step_kinds(StepShape(n_ubatch, 8, ((0, 100),), n_slots=n_slots))
    most = {mix: max((kind.n_rows for kind in kinds if kind.mix is mix), default=0) for mix in Mix}
    # A kind FEW (few rows of one sequence) needs at least as much memory as a kind DECODE with as many rows.
    most[Mix.DECODE] = max(most[Mix.DECODE], most[Mix.FEW])
    # see tests/models/placement/test_step_sizes.py
    most[Mix.PREFILL] = max(most[Mix.PREFILL], most[Mix.BOTH])
    for n_runs in range(1, n_slots + 1):
        for n_single in range(n_runs + 1):
            longer = n_runs - n_single
            for n_rows in range(n_single + 2 * longer, n_ubatch + 1 if longer else n_single + 1):
                if n_rows <= n_ubatch:
                    rows = bucket(n_rows)
                    assert rows <= most[mix_of(rows, n_single, n_runs)], (n_rows, n_single, n_runs)


def test_layers_that_repeat_are_found() -> None:
    assert repeating("aaaaaaaa") == REPEATS + 1
    assert repeating("abbbbbbb") == REPEATS + 2, "a first layer of its own"
    assert repeating("bbbbbbba") == 8, "a last one of its own"
    assert repeating("aabaabaabaabaab") == 12
    assert repeating("abcdefgh") == 8 and repeating("a") == 1


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (arch, n_vocab, tied, values) in SHAPES.items():
        monkeypatch.setitem(synthetic.SHAPES, name, (arch, n_vocab, tied, values | {"block_count": 20}))


@pytest.mark.parametrize(("shares", "name"), only(product(SHARES, list(SHAPES)), "(3, 1)-experts"))
def test_repeated_layers_are_planned_once(
    name: str, shares: tuple[float, ...], deep: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Graph] = []
    true = Graph.begin
    monkeypatch.setattr(Graph, "begin", lambda graph: built.append(graph) or true(graph))
    sizes, n_short = sizes_of(name, shares, halves=False), commands(built)
    built.clear()
    monkeypatch.setattr(traced_steps, "repeating", len)
    assert sizes_of(name, shares, halves=False) == sizes
    # With uneven shares, the layers' plans repeat with a period of three.
    assert commands(built) > 1.25 * n_short


def commands(graphs: list[Graph]) -> int:
    return sum(len(graph.recordings[0].commands) for graph in graphs)


def test_shorter_models_that_need_less_are_not_used(deep: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a shortened model needs less memory than the complete model, all layers are planned. Here a fake
    planner adds memory for every command, so the shortened model needs less."""
    monkeypatch.setattr(sizing, "plan_scratch", lambda recording, reuse: ({}, 999 * len(recording.commands)))
    sizes = sizes_of("dense", (1,), halves=False)
    monkeypatch.setattr(traced_steps, "repeating", len)
    assert sizes_of("dense", (1,), halves=False) == sizes
