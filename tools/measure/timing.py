"""Times runs of a loaded model as llama-bench does. A run computes a prompt or single tokens, after `depth`
tokens in the cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vkbackend.meta.speed import measure_copy, resource_of
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.placement.cost import cost_of
from vkbackend.step import Run

READ_NBYTES = 8 << 20
MAX_READ_NBYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Test:
    """A run of `n_prompt` tokens in micro-batches, then `n_gen` single tokens. `n_depth` tokens precede the
    run in the cache."""

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + self.n_gen

    @property
    def name(self) -> str:
        """Return llama-bench's name, such as pp512, tg128 or pp512 @ d4096."""
        parts = [f"{kind}{n}" for kind, n in (("pp", self.n_prompt), ("tg", self.n_gen)) if n]
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")


@dataclass(frozen=True, slots=True)
class Timing:
    """The seconds of every repetition, and the host's microseconds per all-reduce, if any."""

    test: Test
    seconds: tuple[float, ...]
    reduce_us: float | None

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(self.test.n_tokens / s for s in self.seconds)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rates)

    @property
    def spread(self) -> float:
        return statistics.stdev(self.rates) if len(self.rates) > 1 else 0.0


class Timer:
    """Times tests on a runner, all with the same random token ids."""

    def __init__(self, runner: Runner, max_tokens: int) -> None:
        self.runner = runner
        self.tokens = np.random.default_rng(0).integers(0, runner.n_vocab, max_tokens).tolist()

    def once(self, test: Test) -> float:
        """Return the seconds of one run. The `n_depth` tokens before it are not timed."""
        self._prompt(0, test.n_depth)
        return self.after(test.n_depth, test.n_prompt, test.n_gen)

    def after(self, depth: int, n_prompt: int, n_gen: int) -> float:
        """Return the seconds to compute a prompt at position `depth`, then single tokens."""
        began = time.perf_counter()
        self._prompt(depth, n_prompt)
        for position in range(depth + n_prompt, depth + n_prompt + n_gen):
            self.runner.step(
                self.tokens[position : position + 1],
                [Run(0, 0, 1, position, adapters=self.runner.default_adapters)],
                [0],
            )
        return time.perf_counter() - began

    def warm_up(self, test: Test) -> None:
        if test.n_prompt:
            chunk = min(test.n_prompt, self.runner.n_ubatch)
            for n in {chunk, test.n_prompt % chunk or chunk}:
                self._prompt(0, n)
        if test.n_gen:
            self._prompt(0, 1)

    def time(self, test: Test, repetitions: int) -> Timing:
        n, s = self.runner.reduce_stats()
        seconds = tuple(self.once(test) for _ in range(repetitions))
        return self.timing(test, seconds, n, s)

    def timing(self, test: Test, seconds: Sequence[float], n: int, s: float) -> Timing:
        """`n` and `s` are `reduce_stats` from before the runs."""
        after, spent = self.runner.reduce_stats()
        return Timing(test, tuple(seconds), 1e6 * (spent - s) / (after - n) if after > n else None)

    def _prompt(self, first: int, n: int) -> None:
        for begin in range(first, first + n, self.runner.n_ubatch):
            end = min(begin + self.runner.n_ubatch, first + n)
            outputs = [end - begin - 1] if end == first + n else []
            self.runner.step(
                self.tokens[begin:end],
                [Run(0, 0, end - begin, begin, adapters=self.runner.default_adapters)],
                outputs,
            )


def weight_nbytes_per_step(runner: Runner) -> int:
    cost = cost_of(runner.model, runner.layout, ())
    return sum(cost.read) + sum(cost.host)


def copy_rate(runner: Runner) -> float:
    """Return the bytes per second that copies in the physical devices' memory read and write."""
    rates = {resource_of(device): measure_copy(device) for device in runner.mesh.devices if not device.node}
    return sum(rates.values())


def read_rate(paths: Sequence[Path]) -> float:
    """Return the bytes per second at which the files are read in order, up to 4 GiB."""
    buffer, n, began = memoryview(bytearray(READ_NBYTES)), 0, time.perf_counter()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while n < MAX_READ_NBYTES and (got := file.readinto(buffer)):
                n += got
    return n / (time.perf_counter() - began)


def describe(gguf: GGUF) -> dict[str, Any]:
    infos = gguf.tensors.values()
    sizes: dict[str, int] = {}
    for info in infos:
        if len(info.shape) > 1:
            sizes[info.type] = sizes.get(info.type, 0) + info.nbytes
    main = max(sizes, key=lambda kind: sizes[kind], default="f32")
    name = gguf.string("general.name", "") or gguf.architecture
    words = dict.fromkeys((gguf.architecture, *name.split(), main.upper()))  # without repetitions
    return {
        "model_filename": str(gguf.paths[0]),
        "model_type": " ".join(words),
        "model_size": sum(info.nbytes for info in infos),
        "model_n_params": sum(int(np.prod(info.shape)) for info in infos),
    }
