"""Every architecture produces the same logits with each placement option as on one device without options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import nmse
from oracles.fixture import PROMPT, write
from oracles.fixtures import FIXTURES, build
from prefills import prefilled

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
EXACT: dict[str, Any] = {"n_ctx": 32, "n_ubatch": 16, "reduce_type": "f32"}
_one: dict[str, np.ndarray] = {}


@pytest.mark.wide
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", FIXTURES)
def test_options_change_nothing(tmp_path: Path, name: str, option: str) -> None:
    fixture = build(name)
    path = write(fixture, tmp_path / "model.gguf")
    if name not in _one:
        _one[name] = prefilled(path, ["numpy"], TOKENS, **EXACT)
    n, options = OPTIONS[option]
    if overrides := options.get("override_tensor"):
        read = [
            tensor for tensor in fixture.tensors if not (fixture.unread and tensor.startswith(fixture.unread))
        ]
        there = [o for o in overrides if any(re.search(o[0], tensor) for tensor in read)]
        options = {**options, "override_tensor": tuple(there)}
    assert nmse(prefilled(path, ["numpy"] * n, TOKENS, **EXACT, **options), _one[name]) <= 1e-9
