"""Every architecture with placement options: the logits of one device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import nmse
from oracles.fixture import PROMPT, write
from oracles.fixtures import FIXTURES, build
from runners import load_runner

from vkbackend.step import Run

TOKENS = PROMPT[:14]
OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {  # devices, options
    "llama.cpp's split": (3, {"split_policy": "llama.cpp"}),
    "layers and caches on the host": (2, {"n_gpu_layers": 2, "kv_offload": False}),
    "parts on other devices": (
        3,
        {"override_tensor": ((r"blk\.1\..*(ffn|exps)", "1"), (r"blk\.2\.(attn|ssm)", "2"))},
    ),
    "shares that leave devices without heads": (4, {"tensor_split": (6, 1, 1, 1)}),
}
_one: dict[str, np.ndarray] = {}


def logits(path: Path, n: int, options: dict[str, Any]) -> np.ndarray:
    how: dict[str, Any] = {
        "n_ctx": 32,
        "n_ubatch": 16,
        "type_k": "f32",
        "type_v": "f32",
        "reduce_type": "f32",
    }
    runner = load_runner(path, devices=["numpy"] * n, **how, **options)
    try:
        return runner.step(TOKENS, [Run(0, 0, len(TOKENS), 0)], range(len(TOKENS))).copy()
    finally:
        runner.close()
        assert all(not d.counts for d in runner.mesh.devices)


@pytest.mark.wide
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", FIXTURES)
def test_options_change_nothing(tmp_path: Path, name: str, option: str) -> None:
    path = write(build(name), tmp_path / "model.gguf")
    if name not in _one:
        _one[name] = logits(path, 1, {})
    n, options = OPTIONS[option]
    if overrides := options.get("override_tensor"):
        there = [o for o in overrides if any(re.search(o[0], tensor) for tensor in build(name).tensors)]
        options = {**options, "override_tensor": tuple(there)}
    assert nmse(logits(path, n, options), _one[name]) <= 1e-9
