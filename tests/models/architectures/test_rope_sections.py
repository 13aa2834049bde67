"""glm4 with RoPE sections equals glm4 without sections and with reordered q and k."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from device_sets import nmse
from oracles.fixture import PROMPT, write
from oracles.fixtures import build
from oracles.image_cases import with_sections
from prefills import prefilled

EXACT: dict[str, Any] = {"n_ubatch": 512, "reduce_type": "f32"}


def test_glm4(tmp_path: Path) -> None:
    want = prefilled(write(build("glm4"), tmp_path / "adjacent.gguf"), ["numpy"], PROMPT, **EXACT)
    path = write(with_sections([4, 0, 0, 0]), tmp_path / "halves.gguf")
    for n in (1, 3):
        assert nmse(prefilled(path, ["numpy"] * n, PROMPT, **EXACT), want) <= 1e-10
