from __future__ import annotations

from typing import TYPE_CHECKING

from vkbackend.models.engine.cache.prefix_cache import PrefixCache
from vkbackend.models.engine.messages import Generate, News
from vkbackend.models.engine.runner.micro_batch import Rows
from vkbackend.models.engine.sequence import Batch, Sequence
from vkbackend.models.engine.speculation import Speculation
from vkbackend.models.engine.step_times import StepCost
from vkbackend.models.sampling.rows import Choice, choose_rows
from vkbackend.ops import CELL_BLOCK

if TYPE_CHECKING:
    from vkbackend.models.engine.runner.runner import Runner


Drawing = list[tuple[Sequence, int]]  # (sequence, its row of logits)


class StepResults:
    def __init__(self, runner: Runner, cache: PrefixCache, speculation: Speculation | None) -> None:
        self._runner, self._cache, self._speculation = runner, cache, speculation
        self._n_ctx = None if runner.options.context_shift else runner.n_ctx
        # Without windows and recurrent states, the prefix cache changes only when a block becomes full.
        self._stores_always = any(pool.window for pool in runner.pools) or runner.states is not None

        self._n_draws = self._n_tokens = 0

    def stats(self) -> dict[str, float]:
        """Return the mean number of tokens that a step produced for a sequence."""
        return {"tokens_per_step": self._n_tokens / self._n_draws if self._n_draws else 0.0}

    def take(self, batch: Batch, rows: Rows, cost: StepCost, news: News) -> list[Sequence]:
        """Choose the next tokens from the step's output rows, and add the answers to `news`. Return the
        sequences that have ended."""
        over: list[Sequence] = []
        drawing: Drawing = []
        drafted: list[tuple[Sequence, int]] = []  # (sequence, position of its first row)
        end = 0
        for sequence, n, n_outputs in batch:
            row, end = end, end + n_outputs
            if sequence.is_over:  # cancelled while the step was in flight
                continue
            request, start = sequence.request, sequence.n_stored
            sequence.advance(n - len(sequence.draft), cost)
            if sequence.draft:
                drafted.append((sequence, start))
            else:
                self._store(sequence, start)
            if (progress := sequence.progress()) is not None:
                news.add(progress)
            if not n_outputs:
                continue
            if not isinstance(request, Generate):
                event = sequence.give(rows[1][row:end])
            elif request.max_tokens == 0:
                event = sequence.last(None, "length")
            else:
                drawing.append((sequence, row))
                continue
            news.add(event)
            if event.done:
                over.append(sequence)
        self._n_draws += len(drawing)
        while drawing:
            self._n_tokens += len(drawing)
            drawing = self._answer(drawing, rows, news, over)
        for sequence, start in drafted:
            self._verified(sequence, start)
        return over

    def _answer(self, drawing: Drawing, rows: Rows, news: News, over: list[Sequence]) -> Drawing:
        """Answer with the next token of each sequence. Return the next rows of the sequences whose drafts
        continue with this token."""
        drafted: Drawing = []
        for (sequence, row), choice in zip(drawing, _draw(drawing, rows), strict=True):
            answer = sequence.answer(choice, self._n_ctx)
            news.ids.append(sequence.request.id)
            news.answers.append(answer)
            if not isinstance(answer, int) and answer.done:
                over.append(sequence)
            elif sequence.draft and sequence.accepts(sequence.tokens[-1]):
                drafted.append((sequence, row + 1))
        return drafted

    def _verified(self, sequence: Sequence, start: int) -> None:
        """Keep only the cells of accepted tokens. Later cells are overwritten before they are read."""
        if self._speculation is not None:
            self._speculation.verified(sequence)
        sequence.end_draft(self._runner.settle(sequence.slot, sequence.n_stored))
        if sequence.n_stored > start:
            self._store(sequence, start)

    def _store(self, sequence: Sequence, start: int) -> None:
        if sequence.stage >= 0:
            return  # an encoder's cells are not reused
        stored = sequence.n_stored
        n = stored - start
        if stored % CELL_BLOCK < n or self._stores_always:
            self._cache.stored(sequence.slot, sequence.tokens, stored, sequence.mark)
            if n > 1 or stored <= len(sequence.request.tokens):
                self._cache.snapshot(sequence.slot, start, ends_prompt=sequence.n_wanted == 0)


def _draw(drawing: Drawing, rows: Rows) -> list[Choice]:
    if not drawing:
        return []
    ids, logits, log_sums = rows
    if len(drawing) < len(logits):
        indices = [row for _, row in drawing]
        ids, logits = None if ids is None else ids[indices], logits[indices]
        log_sums = None if log_sums is None else log_sums[indices]
    samplers = [sequence.sampler for sequence, _ in drawing if sequence.sampler]
    return choose_rows(samplers, [sequence.history for sequence, _ in drawing], ids, logits, log_sums)
