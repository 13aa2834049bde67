"""glm4 with RoPE sections equals glm4 without sections and with reordered q and k."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from device_sets import nmse
from oracles.fixture import PROMPT, Fixture, write
from oracles.fixtures import build
from prefills import prefilled

EXACT: dict[str, Any] = {"n_ubatch": 512, "reduce_type": "f32"}


def with_sections() -> Fixture:
    fixture = build("glm4")
    n_rot, head_dim = fixture.keys["rope.dimension_count"], fixture.keys["attention.key_length"]
    fixture.keys["rope.dimension_sections"] = [n_rot // 2, 0, 0, 0]
    halves = [*range(0, n_rot, 2), *range(1, n_rot, 2), *range(n_rot, head_dim)]
    for name, values in fixture.tensors.items():
        if ".attn_q." in name or ".attn_k." in name:
            heads = values.reshape(-1, head_dim, *values.shape[1:])
            fixture.tensors[name] = np.ascontiguousarray(heads[:, halves].reshape(values.shape))
    return fixture


def test_glm4(tmp_path: Path) -> None:
    want = prefilled(write(build("glm4"), tmp_path / "adjacent.gguf"), ["numpy"], PROMPT, **EXACT)
    path = write(with_sections(), tmp_path / "halves.gguf")
    for n in (1, 3):
        assert nmse(prefilled(path, ["numpy"] * n, PROMPT, **EXACT), want) <= 1e-10
