"""Models of many layers record equal layers once. The commands equal a recording of every layer.

The layers of a fixture follow one another several times, so windows, experts and recurrent layers repeat in
periods.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import product, wide
from oracles.fixture import Fixture, write
from oracles.fixtures import FIXTURES, build
from runners import load_runner

from vkbackend import hazards
from vkbackend.meta.step_kind import StepKind
from vkbackend.repeats import RepeatingRecording
from vkbackend.step import Mix

pytestmark = pytest.mark.no_vulkan
TIMES = 7
FEW_TIMES = 4
# on two devices, openelm's splits have a period of six layers; steps in halves need four periods
MORE_TIMES = {"openelm": 10}
FIRST_DIFFERS = ("rwkv7",)
FOURTH = "llama4", "qwen3next", "qwen35", "qwen35moe"
KINDS = StepKind.of_run(1, 1), StepKind.of_run(16, 1), StepKind.of_run(16, 1, halves=True)
FEW = ("qwen3moe",)


def deepened(fixture: Fixture, times: int) -> Fixture:
    """Repeat all layers except leading layers that differ. In some models every fourth layer differs."""
    n = fixture.n_layer
    dense = fixture.keys.get("leading_dense_block_count", int(fixture.arch in FIRST_DIFFERS))
    if fixture.arch in FOURTH:
        layers = [il if il < n else il % 4 for il in range(4 * times)]
    else:
        layers = [*range(n), *list(range(dense, n)) * (times - 1)]
    tensors: dict[str, np.ndarray] = {}
    for name, values in fixture.tensors.items():
        if match := re.match(r"blk\.(\d+)\.", name):
            rest = name[match.end() :]
            tensors |= {f"blk.{il}.{rest}": values for il, of in enumerate(layers) if of == int(match[1])}
        else:
            tensors[name] = values
    keys = {
        key: [value[of] for of in layers] if isinstance(value, list | tuple) and len(value) == n else value
        for key, value in fixture.keys.items()
    }
    return replace(fixture, keys=keys | {"block_count": len(layers)}, tensors=tensors)


@pytest.mark.parametrize(
    ("name", "times"),
    [
        *product(FEW, [FEW_TIMES]),
        *(wide(p) for name in FIXTURES for p in product([name], [MORE_TIMES.get(name, TIMES)])),
    ],
)
def test_deep_models(name: str, times: int, tmp_path: Path) -> None:
    fixture = build(name)
    if fixture.keys.get("nextn_predict_layers") or "per_layer_token_embd.weight" in fixture.tensors:
        pytest.skip("a head follows the layers, or each layer has columns of an embedding")
    path = write(deepened(fixture, times), tmp_path / "deep.gguf")
    check_repeats(path, name, KINDS)


@pytest.mark.wide
def test_deep_models_with_images(tmp_path: Path) -> None:
    """Rows of images are added after each of the first two layers, so no later layer equals these two."""
    fixture = deepened(build("qwen3vl"), FEW_TIMES)
    fixture.keys["n_deepstack_layers"] = 2
    path = write(fixture, tmp_path / "deep.gguf")
    kinds = [kind._replace(images=True) for kind in KINDS[1:]]
    both_ways = KINDS[1]._replace(images=True, sees_end=True, mix=Mix.PREFILL)
    check_repeats(path, "qwen3vl", [*kinds, both_ways, *KINDS], mmproj="x")


def check_repeats(path: Path, name: str, kinds: Sequence[StepKind], **options: Any) -> None:
    runner = load_runner(path, devices=["numpy", "numpy"], n_ctx=64, n_slots=2, n_ubatch=16, **options)
    steps = runner.mesh.steps
    # A layer of kimi-k3 reads the stored inputs of all earlier layers, so no two layers have equal commands.
    none_repeat = {*runner.model.differing} >= {*range(runner.model.n_layer)}
    for kind in kinds:
        once = steps._record(kind)
        steps.repeating = False
        every = steps._record(kind)
        steps.repeating = True
        assert once.reduces == every.reduces
        for a, b in zip(once.executables, every.executables, strict=True):
            assert a.recording.commands == b.recording.commands
            assert {hazard.kind for hazard in hazards.check(a.recording)} <= {"in-place"}
            # This model's layers repeat only after 12 layers: experts have a period of three, and windows a
            # period of four.
            repeats = not none_repeat and not (name == "cohere2moe+rms" and kind.halves)
            assert isinstance(a.recording, RepeatingRecording) is repeats
    runner.close()
