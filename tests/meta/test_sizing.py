"""Sizing plans one of several alike devices, and finds what planning each of them does."""

from __future__ import annotations

from itertools import count

import pytest

from vkbackend.meta import sizing
from vkbackend.meta.sizing import StepSizes
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.options import Options
from vkbackend.models.placement.cost import step_shape, step_sizes
from vkbackend.models.placement.layout import lay_out
from vkbackend.tools.measure import synthetic
from vkbackend.tools.measure.simulated import LIMITS, Hollow

pytestmark = pytest.mark.no_vulkan
DENSE = synthetic._dense(3, 256, 8, 4, 32, 768)
SHAPES = {
    "dense": ("llama", 4096, True, DENSE),
    "experts": ("qwen3moe", 4096, False, synthetic._mixture(8, 2, 64, **DENSE)),
}


def sizes_of(name: str, shares: tuple[float, ...], halves: bool) -> StepSizes:
    options = Options.of(name, devices=["0"] * len(shares), tensor_split=shares, n_ubatch=128)
    gguf = Hollow(f"{name}:f16")
    model, types = load_model(gguf), {key: info.type for key, info in gguf.tensors.items()}
    types.setdefault("output.weight", "f16")
    layout = lay_out(model, types, len(shares), options)
    shape = step_shape(model, layout, options, 128, halves)
    return step_sizes(model, layout, options, [LIMITS] * len(shares), shape)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("shares", [(1,), (1, 1, 1, 1), (3, 1, 3, 1), (1, 1, 0)])
@pytest.mark.parametrize("name", SHAPES)
def test_alike_devices_are_planned_once(
    name: str, shares: tuple[float, ...], halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(synthetic.SHAPES, name, SHAPES[name])
    planned = []
    true = sizing.plan_scratch
    monkeypatch.setattr(sizing, "plan_scratch", lambda *how: planned.append(how) or true(*how))
    found, n_found = sizes_of(name, shares, halves), len(planned)
    planned.clear()
    numbers = count()
    monkeypatch.setattr(sizing, "form_of", lambda recording: (next(numbers),))
    assert sizes_of(name, shares, halves) == found
    assert (n_found < len(planned)) == (len(set(shares)) < len(shares))
