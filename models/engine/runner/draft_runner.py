"""Runs the model that drafts, which follows the sequences of another runner in its own slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vkbackend.models.drafting.draft_model import Rows
from vkbackend.models.engine.cache.prefix_cache import PrefixCache
from vkbackend.models.engine.runner.micro_batch import MicroBatch
from vkbackend.step import Run

if TYPE_CHECKING:
    from vkbackend.models.engine.runner.runner import Runner


class DraftRunner:
    """Every slot has cells for the complete context. Slots share nothing."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.n_ctx = min(runner.n_ctx, runner.model.n_ctx_train)
        self.n_vocab, self.n_ubatch = runner.n_vocab, runner.n_ubatch
        n_slots = runner.n_slots
        self._cache = PrefixCache(runner.pools, n_slots, runner.set_block, runner.states, share=False)
        for slot in range(n_slots):
            self._cache.begin(slot, [])

    def rewind(self, slot: int, n: int) -> int:
        n = self._runner.resume_at(slot, n)
        if n < self._cache.resumable(slot):
            n = 0  # A window has left the blocks before this position.
        if n == 0:
            self._cache.drop(slot)
        else:
            self._cache.stored(slot, (), n)
        return n

    def best(self, rows: Sequence[Rows], summed: bool) -> tuple[np.ndarray, np.ndarray | None]:
        # Steps with several rows compute one-row runs first.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].tokens) > 1)
        tokens: list[int] = []
        runs: list[Run] = []
        for i in order:
            slot, first, more, undoes = rows[i]
            fits = self._cache.reserve(slot, first + len(more))
            assert fits, "each slot has cells for the complete context"
            runs.append(Run(slot, len(tokens), len(more), first, undoes=undoes))
            tokens += more
        outputs = [run.first_row + run.n_rows - 1 for run in runs]
        ids, chances = self._runner.best(MicroBatch(tokens, runs, outputs), summed)
        back = np.argsort(order)
        return ids[back], None if chances is None else chances[back]

    def close(self) -> None:
        self._runner.close()
