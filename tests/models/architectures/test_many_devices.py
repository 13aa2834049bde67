"""Any number of real devices with any shares produces the same logits as one device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from device_sets import device_infos, nmse
from runners import load_runner

from vkbackend.step import Run

FILES = (
    *(f"narrow-{t}" for t in ("F32", "F16", "Q8_0", "Q4_0")),
    "qwen2-Q8_0",
    "moe8x-Q4_0",
    "moe8x-MXFP4",
    "w256-Q4_K",
)
TOKENS = np.random.default_rng(7).integers(3, 512, 12).tolist()
_one: dict[str, np.ndarray] = {}

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(len(device_infos()) < 2, reason="needs devices of two drivers"),
]


def prefill_and_steps(models: Path, name: str, devices: list[str], shares: list[float] | None) -> np.ndarray:
    runner = load_runner(
        models / f"stories-{name}.gguf",
        devices=devices,
        tensor_split=shares,
        n_ctx=32,
        n_ubatch=16,
        type_k="f32",
        type_v="f32",
        reduce_type="f32",
    )
    try:
        parts = [runner.step(TOKENS[:10], [Run(0, 0, 10, 0)], range(10)).copy()]
        parts += [runner.step([TOKENS[p]], [Run(0, 0, 1, p)], [0]).copy() for p in (10, 11)]
    finally:
        runner.close()
    return np.concatenate(parts)


@pytest.mark.parametrize(
    ("devices", "shares", "bound"),
    [
        ("0,0,0,0", None, 1e-9),
        ("0,0,0,0,0", None, 1e-9),
        ("0,0,0,0,0,0,0,0", None, 1e-9),
        ("0,0", [3, 1], 1e-9),
        ("0,0,0", [5, 3, 2], 1e-9),
        ("0,0,0", [0, 1, 1], 1e-9),
        ("0,1", [3, 1], 1e-6),
        ("1,0", [1, 0], 1e-6),
        ("0,1,0", [5, 3, 2], 1e-6),
    ],
)
@pytest.mark.parametrize("name", FILES)
def test_many_devices_equal_one(
    models: Path, name: str, devices: str, shares: list[float] | None, bound: float
) -> None:
    if name not in _one:
        _one[name] = prefill_and_steps(models, name, ["0"], None)
    assert nmse(prefill_and_steps(models, name, devices.split(","), shares), _one[name]) <= bound
