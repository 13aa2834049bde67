"""These tests choose a runtime, and change shaders for kp, without Vulkan."""

from __future__ import annotations

import importlib.util
import shutil
from typing import Any

import numpy as np
import pytest
from runners import load_runner

from vkbackend import env, open_device, shaderlib
from vkbackend.errors import InvalidArgument, UnsupportedFeature
from vkbackend.kompute import spirv
from vkbackend.ops.table import OPS

pytestmark = pytest.mark.no_vulkan


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.RUNTIME, raising=False)
    assert open_device.runtime_of(None) == "native"
    monkeypatch.setenv(env.RUNTIME, "kompute")
    assert open_device.runtime_of(None) == "kompute" and open_device.runtime_of("native") == "native"
    monkeypatch.setenv(env.RUNTIME, "metal")
    with pytest.raises(InvalidArgument, match="'metal' is unknown; there are: native, kompute"):
        open_device.runtime_of(None)
    with pytest.raises(InvalidArgument, match="'cuda' is unknown"):
        load_runner("no such file", runtime="cuda")


def test_without_kp_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    info: Any = object()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedFeature, match=r"`bash tools/setup.sh --kompute`"):
        open_device.open_device(info, runtime="kompute")


@pytest.mark.skipif(
    shutil.which(shaderlib.COMPILER) is None, reason=f"no {shaderlib.COMPILER} (apt install glslang-tools)"
)
@pytest.mark.parametrize(
    ("op", "variant", "n_more"),
    [("add", "f32", 0), ("ssm_scan", "f32", 1), ("embed", "q8_0", 2), ("embed", "iq2_xs", 3)],
)
def test_storage_only(op: str, variant: str, n_more: int) -> None:
    """StepParams, its rows and a codebook become storage buffers of set 0, after the op's buffers."""
    code = shaderlib.spirv(op, variant)
    before, after = np.frombuffer(code, np.uint32), np.frombuffer(spirv.storage_only(code), np.uint32)
    assert before.size == after.size
    assert (before != after).sum() <= 2 * n_more + 4
    decorations: dict[int, dict[int, int]] = {33: {}, 34: {}}
    at = 5
    while at < after.size:
        code_, length = int(after[at]) & 0xFFFF, int(after[at]) >> 16
        assert code_ not in (32, 59) or after[at + (2 if code_ == 32 else 3)] != 2, (
            "the class Uniform is left"
        )
        if code_ == 71 and int(after[at + 2]) in decorations:
            decorations[int(after[at + 2])][int(after[at + 1])] = int(after[at + 3])
        at += length
    assert set(decorations[34].values()) == {0}
    assert sorted(decorations[33].values()) == list(range(len(OPS[op].args) + n_more))


@pytest.mark.parametrize(
    ("driver", "given", "order"),
    [
        ("llvmpipe", "", "word"),
        ("SwiftShader driver", "", "word"),
        ("radv", "", "word"),
        ("NVIDIA", "", "submit"),
        ("NVIDIA", "word", "word"),
        ("llvmpipe", "submit", "submit"),
    ],
)
def test_order_on_a_driver(monkeypatch: pytest.MonkeyPatch, driver: str, given: str, order: str) -> None:
    from vkbackend.kompute.queues import order_of

    monkeypatch.setenv("VKBACKEND_KOMPUTE_ORDER", given)
    assert order_of(driver) == order
