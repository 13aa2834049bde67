"""Models cause no messages of synchronization validation. A test shows that this validation is active."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from caches import compiled, fill
from device_sets import DEVICE_SETS, device_infos, needs_layer, only, product, wide

from vkbackend.ops import measured

pytestmark = pytest.mark.native

RUN = """
import json, sys
from vkbackend.meta.step_kind import StepKind
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.options import Options
from vkbackend.step import Run
from vkbackend.vulkan import instance
path, devices = sys.argv[1], sys.argv[2].split(",")
runner = Runner(Options.of(path, devices=devices, n_ctx=64, n_ubatch=32, n_slots=2))
tokens = list(range(3, 23))
runner.step(tokens, [Run(0, 0, 12, 0), Run(1, 12, 8, 0)], [11, 19])
for pos in range(12, 20):
    runner.step([5, 6], [Run(0, 0, 1, pos), Run(1, 1, 1, pos - 4)], [0, 1])
runner.close()
print(json.dumps(instance.validation_messages))
"""

USED = """
steps = runner.mesh.recorded_step(StepKind.of_run(32, 2)), runner.mesh.recorded_step(StepKind.of_run(2, 2))
executables = [executable for step in steps for executable in step.executables]
used = {getattr(c, "op", "copy") for executable in executables for c in executable.recording.commands}
assert {"quantize_q8", "mat_dot"} <= used, used
"""

UNORDERED = """
import json
from vkbackend.vulkan import instance
from vkbackend.buffer import Home, View
from vkbackend.vulkan.device import VulkanDevice
from vkbackend.recording import Barrier, Recording, derive_barriers
device = VulkanDevice(instance.devices()[0])
a, b, c = (View(device.buffer(1024, Home.WEIGHTS, n), 0, (256,)) for n in "abc")
recording = Recording("unordered")
recording.copy(a, b)
recording.copy(b, c)
bare = Recording("bare", [x for x in derive_barriers(recording).commands if not isinstance(x, Barrier)])
device.build(bare).close()
print(json.dumps(instance.validation_messages))
"""


def messages(script: str, *args: str, **env: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", script, *args],
        env=os.environ | {"VKBACKEND_VALIDATION": "1"} | env,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    return list(json.loads(result.stdout.splitlines()[-1]))


@needs_layer
@pytest.mark.parametrize(
    ("devices", "disable"), only(product(DEVICE_SETS, ["", "timeline", "host_import"]), "0,0,0-host_import")
)
def test_model_causes_no_messages(models: Path, devices: list[str], disable: str) -> None:
    path = models / "stories-narrow-Q8_0.gguf"
    assert messages(RUN, str(path), ",".join(devices), VKBACKEND_DISABLE=disable) == []


@needs_layer
@pytest.mark.wide
@pytest.mark.parametrize("devices", [p for p in DEVICE_SETS if p.id == "1,0"])
def test_codebooks_cause_no_messages(models: Path, devices: list[str]) -> None:
    path = models / "stories-w256-IQ3_S.gguf"
    assert messages(RUN, str(path), ",".join(devices)) == []


@needs_layer
@pytest.mark.parametrize(
    "devices", [p if p.id == "0" else wide(p) for p in DEVICE_SETS if p.id in ("0", "1,0")]
)
def test_8_bit_activations_cause_no_messages(
    models: Path, devices: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, compiled())
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    monkeypatch.delenv("VKBACKEND_EXACT")
    for info in device_infos():
        few, many = ("mat_dot",), ("mat_mul_dot",)
        measured.save(info, {"one": few, "few": few, "some": many, "more": many, "many": many})
    run = RUN.replace("runner.close()", USED + "runner.close()")
    assert messages(run, str(models / "stories-w256-Q4_K.gguf"), ",".join(devices)) == []


@needs_layer
@pytest.mark.parametrize("devices", DEVICE_SETS[:1])
def test_validation_is_active(devices: list[str]) -> None:
    assert any("SYNC-HAZARD" in m for m in messages(UNORDERED))
