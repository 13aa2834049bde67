"""A runner without a model: the logits of a row depend on all tokens of its sequence, so a mixed-up slot
shows.

It refuses what the real one may not be given. Importable by spawned processes.
"""

import os
import signal
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from vkbackend.errors import DeviceLost, OutOfDeviceMemory
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Progress
from vkbackend.models.options import Options
from vkbackend.step import Run

N_VOCAB = 50
DEATH, HANG, LOST, NAN, SLOW = 44, 45, 46, 47, 48  # tokens that make something happen when they are fed


def row_of(tokens: Sequence[int]) -> np.ndarray:
    """Logits [N_VOCAB] after `tokens`; the best is never one of the special tokens."""
    rng = np.random.default_rng(
        hash(tuple(tokens)) & 0xFFFFFFFF
    )  # hashes of ints do not vary between processes
    logits = rng.normal(0, 2, N_VOCAB).astype(np.float32)
    logits[40:] -= 100
    return logits


def continuation(tokens: Sequence[int], n: int) -> list[int]:
    """The greedy continuation."""
    out = list(tokens)
    for _ in range(n):
        out.append(int(row_of(out).argmax()))
    return out[len(tokens) :]


class FakeRunner:
    n_vocab = N_VOCAB
    max_top_k = 0
    prediction = None
    notes: tuple[str, ...] = ()

    def __init__(self, *, n_ctx: int = 64, n_slots: int = 1, n_ubatch: int = 16,
                 max_outputs: int | None = None, keeps: int = 0) -> None:  # fmt: skip
        self.n_ctx, self.n_slots, self.n_ubatch = n_ctx or 64, n_slots, n_ubatch
        self.max_outputs = max_outputs or n_ubatch
        self.keeps = keeps  # steps back that a sequence may go on from, 0: all
        self.slots: list[list[int]] = [[] for _ in range(n_slots)]
        self.steps: list[list[Run]] = []
        self.closed = 0

    def resume_at(self, slot: int, position: int) -> int:
        return position

    def step(self, tokens: Sequence[int], runs: Sequence[Run], outputs: Sequence[int]) -> np.ndarray:
        assert not self.closed
        assert 0 < len(tokens) <= self.n_ubatch and len(outputs) <= self.max_outputs
        assert [r.first_row for r in runs] == [sum(r.n_rows for r in runs[:i]) for i in range(len(runs))]
        assert sum(r.n_rows for r in runs) == len(tokens) and all(r.n_rows for r in runs)
        assert len({r.slot for r in runs}) == len(runs)
        self.steps.append(list(runs))
        self._misbehave(tokens)
        rows: list[np.ndarray] = []
        for r in runs:
            stored = self.slots[r.slot]
            assert r.first_pos <= len(stored) and r.first_pos + r.n_rows <= self.n_ctx
            del stored[r.first_pos :]
            for token in tokens[r.first_row : r.first_row + r.n_rows]:
                stored.append(token)
                rows.append(np.full(N_VOCAB, np.nan, np.float32) if token == NAN else row_of(stored))
        return np.array([rows[i] for i in outputs], np.float32).reshape(len(outputs), N_VOCAB)

    def _misbehave(self, tokens: Sequence[int]) -> None:
        if DEATH in tokens:
            os._exit(3)
        if HANG in tokens:
            os.kill(os.getpid(), signal.SIGSTOP)
        if LOST in tokens:
            raise DeviceLost("device Vulkan7 was lost")
        if SLOW in tokens:
            time.sleep(0.02)

    def resumable(self, n_stored: int) -> int:
        return max(0, n_stored - self.keeps) if self.keeps else 0

    def memory(self) -> list[dict[str, Any]]:
        return [{"device": "fake", "weights": 1, "kv": 2, "scratch": 3, "staging": 4}]

    def device_names(self) -> list[str]:
        return ["fake"]

    def reduce_stats(self) -> tuple[int, float]:
        return 2 * len(self.steps), 1e-5 * len(self.steps)

    def close(self) -> None:
        self.closed += 1


def fake(options: Options, progress: Progress | None = None) -> FakeRunner:
    return FakeRunner(n_ctx=options.n_ctx, n_slots=options.n_slots, n_ubatch=options.n_ubatch)


MODULE = SimpleNamespace(Runner=fake)  # in place of vkbackend.models.engine.runner


def open_fake(options: Options, progress: Progress | None) -> Engine:
    if options.path == "too big":
        raise OutOfDeviceMemory("needs 9 of 5 bytes", requested=9, budget=5, heap=1)
    if options.path == "bug":
        raise ZeroDivisionError("a bug")
    if progress is not None:
        progress(1, 2)
        progress(2, 2)
    return Engine(FakeRunner(n_ctx=options.n_ctx, n_slots=options.n_slots))  # type: ignore[arg-type]
