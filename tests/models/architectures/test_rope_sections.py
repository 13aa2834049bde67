"""Texts of GLM models are equal with and without RoPE sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import nmse
from oracles.fixture import PROMPT, write
from oracles.fixtures import build
from oracles.image_cases import with_sections
from prefills import prefilled

EXACT: dict[str, Any] = {"n_ubatch": 512, "reduce_type": "f32"}


@pytest.mark.wide
def test_sections_of_glm4moe_do_not_change_texts(tmp_path: Path) -> None:
    """The model is like GLM-4.5V, whose RoPE is half-split with and without sections."""
    fixture = build("glm4moe")
    want = prefilled(write(fixture, tmp_path / "plain.gguf"), ["numpy"], PROMPT, **EXACT)
    fixture.keys["rope.dimension_sections"] = [2, 1, 1, 0]
    path = write(fixture, tmp_path / "sections.gguf")
    np.testing.assert_array_equal(prefilled(path, ["numpy"], PROMPT, **EXACT), want)


def test_glm4(tmp_path: Path) -> None:
    want = prefilled(write(build("glm4"), tmp_path / "adjacent.gguf"), ["numpy"], PROMPT, **EXACT)
    path = write(with_sections([4, 0, 0, 0]), tmp_path / "halves.gguf")
    for n in (1, 3):
        assert nmse(prefilled(path, ["numpy"] * n, PROMPT, **EXACT), want) <= 1e-10
