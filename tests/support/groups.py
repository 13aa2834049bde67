"""Lists of devices on several nodes, which are threads of one process."""

from __future__ import annotations

from typing import Any

import numpy as np

from vkbackend.models.engine.runner.runner import Runner
from vkbackend.step import Run

TOKENS = np.random.default_rng(3).integers(3, 120, 300).tolist()

OPTIONS: dict[str, Any] = {"n_ctx": 192, "n_slots": 2, "n_ubatch": 128, "reduce_type": "f32"}


def here(places: list[str]) -> list[str]:
    return [place.partition("/")[2] for place in places]


TWO, THREE = ["0/numpy", "1/numpy"], ["0/numpy", "1/numpy", "1/numpy"]

FOUR, HOSTS = ["0/numpy", "0/numpy", "1/numpy", "1/numpy"], ["0/numpy", "1/numpy", "2/numpy"]


def logits_of_two_slots(runner: Runner) -> np.ndarray:
    """Return the logits of four steps. The first step computes two prompts, the next two continue both, and
    the last continues one."""
    out = [runner.step(TOKENS[:80], [Run(0, 0, 50, 0), Run(1, 50, 30, 0)], [49, 79]).copy()]
    for i in range(2):
        runs = [Run(0, 0, 1, 50 + i), Run(1, 1, 1, 30 + i)]
        out.append(runner.step(TOKENS[80 + i : 82 + i], runs, [0, 1]).copy())
    out.append(runner.step([7], [Run(1, 0, 1, 32)], [0]).copy())
    return np.concatenate(out)
