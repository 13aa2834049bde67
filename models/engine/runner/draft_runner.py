"""Runs the model that drafts: a head of the main model, or a smaller model that follows the sequences in its
own slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vkbackend.meta.step_kind import Wanted
from vkbackend.models.drafting.draft_model import Rows
from vkbackend.models.drafting.drafter import Adapters
from vkbackend.models.engine.cache.prefix_cache import PrefixCache
from vkbackend.models.engine.runner.micro_batch import BatchImages, MicroBatch
from vkbackend.step import Run

if TYPE_CHECKING:
    from vkbackend.models.engine.runner.runner import Runner


class HeadRunner:
    """Runs the head of the runner's model."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @property
    def is_idle(self) -> bool:
        return self._runner.is_idle

    def draft(
        self,
        tokens: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        summed: bool = False,
        adapters: Sequence[Adapters] = (),
        offsets: Sequence[int] = (),
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the tokens that the head expects after the token at each slot's position, int64 [n]. If
        `summed`, also return their probabilities, float64 [n]. `adapters` lists each row's adapters, and
        `offsets` how far RoPE's positions are from the cells. The slots must own the positions' cells."""
        runs = [Run(slot, i, 1, at) for i, (slot, at) in enumerate(zip(slots, positions, strict=True))]
        for run, used in zip(runs, adapters, strict=False):
            run.adapters = used
        images = None
        if any(offsets):
            images = BatchImages((), np.repeat(np.add(positions, offsets)[:, None], 3, axis=1))
        batch = MicroBatch(tokens, runs, range(len(runs)), images=images)
        ids, chances = best_tokens(self._runner, batch, summed, ahead=True)
        of_head = self._runner.model.draft_ids
        return ids if of_head is None else of_head[ids], chances


class DraftRunner:
    """Runs a smaller model. Every slot has cells for the complete context. Slots share nothing."""

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
            n = 0  # a window has released the blocks before `n`
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
        ids, chances = best_tokens(self._runner, MicroBatch(tokens, runs, outputs), summed)
        back = np.argsort(order)
        return ids[back], None if chances is None else chances[back]

    def close(self) -> None:
        self._runner.close()


def best_tokens(
    runner: Runner, batch: MicroBatch, summed: bool, *, ahead: bool = False
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the likeliest token of each output row, int64 [n]. If `summed`, also return their probabilities,
    float64 [n]."""
    k = min(1, runner.max_top_k)
    wanted = Wanted(k, summed and k > 0, ahead=ahead)
    ids, logits, log_sums = runner.collect(runner.launch(batch, wanted))
    if ids is None:
        ids = logits.argmax(axis=1, keepdims=True)
        best = np.take_along_axis(logits, ids, 1)
        log_sums = best[:, 0] + np.log(np.exp(logits - best, dtype=np.float64).sum(axis=1))
        logits = best
    return ids[:, 0], np.exp(logits[:, 0] - log_sums) if summed and log_sums is not None else None
