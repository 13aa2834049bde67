"""An engine that takes prompts with rows of images, and keeps the logits of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from runners import F32, load_runner
from scheduling import GREEDY, Everything, finish, tokens_of

from vkbackend.models.engine.cache.image_spans import with_row_ids
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Generate
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.vision.rows import ImageRows
from vkbackend.tools.measure.twin_nodes import twin_runner


def image_of(seed: int, n_rows: int, width: int, **how: Any) -> ImageRows:
    values = np.random.default_rng(seed).normal(0, 1, (n_rows, width)).astype(np.float32)
    grid = how.pop("grid", (1, n_rows))
    return ImageRows(bytes([seed]) * 16, values, grid, how.pop("both_ways", False))


class Watched:
    """An engine that keeps the rows of logits."""

    OPTIONS: ClassVar = {"n_ctx": 96, "n_slots": 2, "mmproj": "x", "exact": True, **F32}

    def __init__(self, path: Path, devices: list[str], **options: Any) -> None:
        self.watch(load_runner(path, devices=devices, **Watched.OPTIONS | options))

    def watch(self, runner: Runner) -> None:
        self.runner = runner
        self.engine = Engine(self.runner, Everything())
        self.logits: list[np.ndarray] = []
        self.n_rows: list[int] = []  # of each step
        collect, launch = self.runner.collect, self.runner.launch

        def collected(handle: Any) -> Any:
            rows = collect(handle)
            self.logits += list(rows[1].copy())
            return rows

        def launched(batch: Any, wanted: Any) -> Any:
            self.n_rows.append(len(batch.tokens))
            return launch(batch, wanted)

        self.runner.collect, self.runner.launch = collected, launched  # type: ignore[method-assign]
        self._n = 0

    def run(self, *prompts: list[int | ImageRows], n: int = 1, **how: Any) -> list[list[int]]:
        requests = []
        for prompt in prompts:
            tokens, images = with_row_ids(prompt)
            self._n += 1
            requests.append(Generate(self._n, tokens, n, GREEDY, images=images, **how))
        self.logits, self.n_rows = [], []
        events = finish(self.engine, requests)  # type: ignore[arg-type]
        for of_request in events.values():
            if of_request[-1].error:
                raise of_request[-1].error.exception()
        return [tokens_of(events[request.id]) for request in requests]


@contextmanager
def on_hosts(path: Path, places: list[str], **options: Any) -> Iterator[Watched]:
    engine = object.__new__(Watched)
    with twin_runner(path, places, **Watched.OPTIONS, **options) as runner:
        engine.watch(runner)
        yield engine


@contextmanager
def watched(path: Path, devices: list[str], **options: Any) -> Iterator[Watched]:
    engine = Watched(path, devices, **options)
    try:
        yield engine
    finally:
        engine.engine.close()
