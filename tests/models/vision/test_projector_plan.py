"""A projector's memory is known before the projector is loaded, and the model gets the remaining memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import device_infos, wide
from oracles.fixture import write
from oracles.vision import BUILDERS, build
from tiny_vision import write_projector

from vkbackend.errors import OutOfDeviceMemory
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.runner import loading
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.engine.runner.planned_memory import planned_memory
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options
from vkbackend.models.placement import fit
from vkbackend.models.vision import projector_plan
from vkbackend.models.vision.config import TokenLimits
from vkbackend.models.vision.picture import Picture, Tile
from vkbackend.models.vision.projector import Projector
from vkbackend.models.vision.projector_plan import plan_projector

needs_device = pytest.mark.skipif(not device_infos(), reason="no Vulkan device is present")
DEFAULT = ("idefics3", "numpy"), ("qwen3vl", "0")
CASES = [
    pytest.param(name, device, marks=() if device == "numpy" else needs_device)
    for name in BUILDERS
    for device in ("numpy", "0")
]


@pytest.mark.parametrize(
    ("name", "on"),
    [case if case.values in DEFAULT else wide(case) for case in CASES],
)
def test_the_plan_equals_the_allocator(tmp_path: Path, name: str, on: str) -> None:
    path = write(build(name), tmp_path / "mmproj.gguf")
    [opened] = open_devices([on])
    limits = TokenLimits(max_tokens=16)
    with GGUF.open(path) as gguf:
        plan = plan_projector(gguf, opened, limits=limits)
    assert not sum(opened.nbytes.values())
    with Projector.open(path, opened, limits=limits) as projector:
        n = plan.encoder.most_patches(plan.encoder.config.most_tokens(limits))
        width = plan.encoder.table_widths()["patches"]
        if name == "idefics3":  # the picture is a square of the largest size
            side = round(n**0.5)
            tile = Tile(np.zeros((n, width), np.float32), (side, side))
            projector.encode(Picture(bytes(16), (tile,), (0,)))
        allocated = {home.value: nbytes for home, nbytes in opened.nbytes.items() if nbytes}
        assert allocated == {home: nbytes for home, nbytes in plan.held.homes.items() if nbytes}


def test_a_projector_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice fits."""
    path = write(build("qwen2vl"), tmp_path / "mmproj.gguf")
    budget = fit.Budget("card", 5 << 18, (0,))
    monkeypatch.setattr(projector_plan, "budgets_of", lambda devices: [budget])

    def opened(**limits: int) -> Projector:
        return Projector.open(path, open_devices(["numpy"])[0], limits=TokenLimits(**limits))

    with pytest.raises(OutOfDeviceMemory, match=r"card would hold .* of the projector") as caught:
        opened(max_tokens=64)
    n_tokens = int(re.findall(r"--image-max-tokens (\d+)", str(caught.value))[0])
    opened(max_tokens=n_tokens).close()
    with pytest.raises(OutOfDeviceMemory):
        opened(max_tokens=4 * n_tokens)


@needs_device
def test_a_model_gets_what_the_projector_leaves(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, projector = models / "stories-narrow-F32.gguf", write_projector(tmp_path / "mmproj.gguf", 64)
    given: dict[str, Any] = {"devices": ["0"], "n_ctx": 64, "n_ubatch": 16, "mmproj": projector}
    [device] = open_devices(["0"])
    with GGUF.open(projector) as gguf:
        own = plan_projector(gguf, device).resident.nbytes(device, fit.ON_DEVICE)
    [held], _ = planned_memory(Options.of(path, **given), [device])
    room = own + sum(held.homes[home] for home in fit.ON_DEVICE)

    def opened(nbytes: int, **options: Any) -> int | str | None:
        for module in (fit, loading, projector_plan):
            monkeypatch.setattr(module, "budgets_of", lambda _: [fit.Budget("card", nbytes, (0,))])
        engine = Engine.open(Options.of(path, **given, **options))
        try:
            return engine.runner.options.n_gpu_layers
        finally:
            engine.close()

    assert opened(room, n_gpu_layers="auto") is None
    fewer = opened(room - 1, n_gpu_layers="auto")
    assert isinstance(fewer, int) and fewer < 6
    besides = r"has .* MiB besides .* MiB of the draft model and .* MiB of the projector; "
    with pytest.raises(OutOfDeviceMemory, match=besides):
        opened(room - 1, draft=path)
