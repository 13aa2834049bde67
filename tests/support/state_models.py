"""Models whose slots are saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from runners import load_runner

from vkbackend import LLM
from vkbackend.models.engine.runner.runner import Runner

F32 = {"type_k": "f32", "type_v": "f32"}
PROMPT = [1, 403, 407, 261, 378]
TOKENS = [1, *np.random.default_rng(7).integers(3, 500, 49).tolist()]


def model(models: Path, name: str = "stories-narrow-Q8_0") -> Path:
    return models / f"{name}.gguf"


def open_llm(models: Path, n: int = 1, name: str = "stories-narrow-Q8_0", **options: Any) -> LLM:
    return LLM(model(models, name), devices=["numpy"] * n, **{"n_ctx": 96, **F32, **options})


def open_runner(
    models: Path, devices: list[str], name: str = "stories-narrow-Q8_0", **options: Any
) -> Runner:
    return load_runner(model(models, name), devices=devices, **{"n_ctx": 96, **F32, **options})
