"""Functions that open a model on devices and return the logits of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from runners import load_runner

from vkbackend.models.engine.runner.runner import Runner
from vkbackend.step import Run

TOKENS = np.random.default_rng(5).integers(0, 128, 20).tolist()


@contextmanager
def opened(path: Path, devices: list[str], **options: Any) -> Iterator[Runner]:
    options = {"n_ctx": 64, "n_ubatch": 64, "type_k": "f32", "type_v": "f32"} | options
    runner = load_runner(path, devices=devices, **options)
    try:
        yield runner
    finally:
        runner.close()
        assert all(not d.counts for d in runner.mesh.devices), [d.counts for d in runner.mesh.devices]


def prefill(runner: Runner, tokens: list[int] = TOKENS, slot: int = 0, first: int = 0) -> np.ndarray:
    """Return the logits of all tokens, whose positions begin at `first`."""
    return runner.step(tokens, [Run(slot, 0, len(tokens), first)], range(len(tokens))).copy()


def prefilled(path: Path, devices: list[str], tokens: list[int] = TOKENS, **options: Any) -> np.ndarray:
    with opened(path, devices, **options) as runner:
        return prefill(runner, tokens)
