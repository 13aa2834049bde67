"""Opens models with their multi-token prediction heads, and drafts with a runner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from oracles.fixture import N_CTX, write
from oracles.heads import with_head
from prefills import opened

from vkbackend.meta.step_kind import Wanted
from vkbackend.models.engine.runner.micro_batch import MicroBatch
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.step import Run

OPTIONS: dict[str, Any] = {"n_ctx": N_CTX, "n_ubatch": N_CTX, "reduce_type": "f32"}


def file_with_head(folder: Path, name: str) -> Path:
    path = folder / f"{name}-head.gguf"
    return path if path.exists() else write(with_head(name), path)


@contextmanager
def opened_with_head(path: Path, devices: list[str], **options: Any) -> Iterator[Runner]:
    with opened(path, devices, **OPTIONS | {"speculation": "mtp"} | options) as runner:
        yield runner


def draft(
    runner: Runner, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]
) -> np.ndarray:
    """Return the head's logits after one token per slot, [n, n_vocab]."""
    runs = [Run(slot, i, 1, at) for i, (slot, at) in enumerate(zip(slots, positions, strict=True))]
    batch = MicroBatch(tokens, runs, range(len(runs)))
    return runner.collect(runner.launch(batch, Wanted(ahead=True)))[1].copy()
