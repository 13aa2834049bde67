from __future__ import annotations

from typing import TYPE_CHECKING

from vkbackend.models.engine.cache.prefix_cache import PrefixCache
from vkbackend.models.engine.messages import Logits, News
from vkbackend.models.engine.micro_batch import Rows
from vkbackend.models.engine.sequence import Batch, Sequence
from vkbackend.models.engine.step_times import StepCost
from vkbackend.models.sampling.rows import Choice, choose_rows
from vkbackend.ops import CELL_BLOCK

if TYPE_CHECKING:
    from vkbackend.models.engine.runner import Runner


class StepResults:
    def __init__(self, runner: Runner, cache: PrefixCache) -> None:
        self._cache = cache
        self._n_ctx = None if runner.options.context_shift else runner.n_ctx
        # Without windows and recurrent states, the prefix cache changes only when a block becomes full.
        self._stores_always = any(pool.window for pool in runner.pools) or runner.states is not None

    def take(self, batch: Batch, rows: Rows, cost: StepCost, news: News) -> list[Sequence]:
        """Choose the next tokens from the step's output rows, and add the answers to `news`. Return the
        sequences that have ended."""
        over: list[Sequence] = []
        drawing: list[Sequence] = []
        draw_rows: list[int] = []
        end = 0
        for sequence, n, n_outputs in batch:
            row, end = end, end + n_outputs
            if sequence.is_over:  # cancelled while the step was in flight
                continue
            sequence.advance(n, cost)
            request, stored = sequence.request, sequence.n_stored
            if stored % CELL_BLOCK < n or self._stores_always:
                self._cache.stored(sequence.slot, sequence.tokens, stored)
                if n > 1 or stored <= len(request.tokens):
                    self._cache.snapshot(sequence.slot, stored - n)
            if (progress := sequence.progress()) is not None:
                news.add(progress)
            if not n_outputs:
                continue
            if isinstance(request, Logits):
                event = sequence.give(rows[1][row:end])
            elif request.max_tokens == 0:
                event = sequence.last(None, "length")
            else:
                drawing.append(sequence)
                draw_rows.append(row)
                continue
            news.add(event)
            if event.done:
                over.append(sequence)
        for sequence, choice in zip(drawing, _draw(drawing, draw_rows, rows), strict=True):
            answer = sequence.answer(choice, self._n_ctx)
            news.ids.append(sequence.request.id)
            news.answers.append(answer)
            if not isinstance(answer, int) and answer.done:
                over.append(sequence)
        return over


def _draw(drawing: list[Sequence], indices: list[int], rows: Rows) -> list[Choice]:
    if not drawing:
        return []
    ids, logits, log_sums = rows
    if len(indices) < len(logits):
        ids, logits = None if ids is None else ids[indices], logits[indices]
        log_sums = None if log_sums is None else log_sums[indices]
    samplers = [sequence.sampler for sequence in drawing if sequence.sampler]
    return choose_rows(samplers, [sequence.history for sequence in drawing], ids, logits, log_sums)
