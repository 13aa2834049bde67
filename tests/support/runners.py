"""Opens a runner with keyword arguments, and runs single steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np

from vkbackend.meta.candidates import TopK
from vkbackend.meta.step_kind import Wanted
from vkbackend.models.engine.runner.micro_batch import MicroBatch
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.keywords import Keywords
from vkbackend.models.options import Options
from vkbackend.step import Run

F32: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "reduce_type": "f32"}


def load_runner(
    model: str | os.PathLike[str] | GGUF,
    *,
    progress: Callable[[int, int], None] | None = None,
    keep_values: bool = False,
    interleave: bool | None = None,
    **options: Unpack[Keywords],
) -> Runner:
    """Load a model. By default all devices have equal shares, so no device's speed is measured."""
    gguf = model if isinstance(model, GGUF) else None
    wanted = Options.of(gguf.paths[0] if gguf else model, **options)  # type: ignore[arg-type]
    if wanted.tensor_split is None and wanted.devices:
        wanted = Options.of(wanted.path, **{**options, "tensor_split": [1] * len(wanted.devices)})
    return Runner(wanted, gguf, progress=progress, keep_values=keep_values, interleave=interleave)


def step_hidden(
    runner: Runner, tokens: Sequence[int], runs: Sequence[Run], outputs: Sequence[int]
) -> np.ndarray:
    """Run a step and return the hidden states of its output rows, float32 [len(outputs), n_embd]."""
    return runner.collect(runner.launch(MicroBatch(tokens, runs, outputs), Wanted(hidden=True)))[1]


def step_top_k(
    runner: Runner,
    tokens: Sequence[int],
    runs: Sequence[Run],
    outputs: Sequence[int],
    k: int,
    masks: np.ndarray | None = None,
    summed: bool = False,
) -> TopK:
    """Run a step and return the best `k` tokens of each output row, at most `max_top_k`."""
    handle = runner.launch(MicroBatch(tokens, runs, outputs, masks), Wanted(k, summed))
    ids, logits, log_sums = runner.collect(handle)
    assert ids is not None
    return TopK(ids, logits, log_sums)
