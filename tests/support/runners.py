"""Opens a runner with keyword arguments."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Unpack

from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.keywords import Keywords
from vkbackend.models.options import Options

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
