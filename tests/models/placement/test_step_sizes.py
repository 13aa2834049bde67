"""Kinds of steps that `step_kinds` omits need no more memory than the kinds that it returns."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_sets import only
from oracles.fixture import write
from oracles.fixtures import FIXTURES, build
from runners import load_runner

from vkbackend.meta import sizing
from vkbackend.meta.sizing import StepShape, step_kinds
from vkbackend.meta.step_kind import StepKind
from vkbackend.models.placement.traced_steps import step_sizes
from vkbackend.step import Mix

pytestmark = pytest.mark.no_vulkan


@pytest.mark.parametrize("name", only(FIXTURES, "glm-dsa", "qwen35moe"))
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_a_prefill_needs_no_more_than_a_step_that_also_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, n: int
) -> None:
    path = write(build(name), tmp_path / "model.gguf")
    runner = load_runner(path, devices=["numpy"] * n, n_ctx=128, n_slots=4, n_ubatch=64)
    runner.close()
    limits = [device.limits for device in runner.mesh.devices]
    planned = runner.model, runner.layout, runner.options, limits, runner._shape
    sizes = step_sizes(*planned)

    def with_prefills(shape: StepShape) -> list[StepKind]:
        kinds = step_kinds(shape)
        more = [kind._replace(mix=Mix.PREFILL) for kind in kinds if kind.mix is Mix.BOTH]
        assert more and not {*more} & {*kinds}
        return [*kinds, *more]

    monkeypatch.setattr(sizing, "step_kinds", with_prefills)
    assert step_sizes(*planned) == sizes
