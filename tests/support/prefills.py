"""A model on devices, and a prompt's logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from runners import load_runner

from vkbackend.models.engine.runner import Runner
from vkbackend.step import Run

TOKENS = np.random.default_rng(5).integers(0, 128, 20).tolist()


@contextmanager
def opened(path: Path, devices: list[str], **options: Any) -> Iterator[Runner]:
    options = {"n_ctx": 64, "n_ubatch": 32, "type_k": "f32", "type_v": "f32"} | options
    runner = load_runner(path, devices=devices, **options)
    try:
        yield runner
    finally:
        runner.close()
        assert all(not d.counts for d in runner.mesh.devices), [d.counts for d in runner.mesh.devices]


def prefill(runner: Runner, tokens: list[int] = TOKENS) -> np.ndarray:
    return runner.step(tokens, [Run(0, 0, len(tokens), 0)], range(len(tokens))).copy()
