"""Drafts by a smaller model with the same vocabulary (speculative decoding, Leviathan et al. 2023,
arXiv:2211.17192).

The draft model follows each sequence in a separate slot. It computes the missing tokens only when it drafts,
so a prompt does not wait for it. If many tokens are missing, it skips all but the last ones, until its drafts
are right often enough. It drafts the likeliest token at each position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np

from vkbackend.models.common_prefix import n_common
from vkbackend.models.drafting.drafter import Draft, Want
from vkbackend.models.drafting.prices import ROWS, Recent

N_MEASURED = 3  # steps of each kind
MEASURED_SHARE = 0.01  # steps that only measure may take this share of the time
N_PROMPT = 128  # rows of the prompt step that is measured
# If the draft model skips tokens, it computes the first SINK tokens and at least SHORT of the last tokens.
# Without the first tokens, attention would be far from what it learned (attention sinks, Xiao et al. 2023,
# arXiv:2309.17453).
SINK, SHORT = 4, 12
PAID_ROWS = (SINK + SHORT, N_PROMPT)  # only two numbers of rows, because a step is recorded for each
# The source of drafts for which tokens were skipped. On stories of 290 tokens, the test models' drafted
# tokens were right in 90 % of cases with the complete text, in 41 % with 64 tokens of it, and in 15 % with
# 16.
GAPPED = "draft-gapped"


class Rows(NamedTuple):
    """Consecutive tokens of a slot, from position `first` on. If `undoes` is set, the slot can later go back
    to position `first`."""

    slot: int
    first: int
    tokens: Sequence[int]
    undoes: bool = False


class Gap(NamedTuple):
    """The draft model skips the tokens `start` to `end - 1` of a sequence."""

    start: int = 0
    end: int = 0

    def left(self, tokens: Sequence[int]) -> Sequence[int]:
        return [*tokens[: self.start], *tokens[self.end :]] if self.end else tokens

    @property
    def n(self) -> int:
        return self.end - self.start


class Follower(Protocol):
    """The draft model. A slot has cells for all positions below `n_ctx`."""

    n_ctx: int
    n_vocab: int
    n_ubatch: int

    def rewind(self, slot: int, n: int) -> int:
        """Forget the positions from `n` on. Return the first position that must be computed, at most `n`."""

    def best(self, rows: Sequence[Rows], summed: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Compute rows, and return the likeliest token after each slot's last row, int64 [n]. If `summed`,
        also return its probability, float64 [n]."""

    def close(self) -> None: ...


class DraftModel:
    """`n_vocab` is the size of the vocabulary that both models share. A draft ends before a token that the
    draft model finds less probable than `p_min`. `is_busy` returns whether steps of the other model are in
    flight; then nothing is drafted. `clock` returns seconds, not counting the time to record steps. `seconds`
    is the minimum recent time of a step with one row per sequence, or 0 before `measure`."""

    stores = False
    source = "draft"

    def __init__(
        self,
        model: Follower,
        n_slots: int,
        n_vocab: int,
        p_min: float = 0.0,
        is_busy: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._model, self._n_vocab, self._p_min = model, min(n_vocab, model.n_vocab), p_min
        self._is_busy, self._clock = is_busy, clock
        self._stored: list[list[int]] = [[] for _ in range(n_slots)]  # tokens whose cells are computed
        self._times = Recent()
        self.spent_s = 0.0
        self._row_s = 0.0  # seconds per row in a step with many rows
        self._measure_at = 0.0
        self._numbers = [-1] * n_slots  # the number of each slot's sequence
        self._gaps = [Gap()] * n_slots  # the tokens of each slot's sequence that are skipped

    @property
    def seconds(self) -> float:
        return self._times.seconds

    def measure(self) -> bool:
        """Record the steps for several sequences and for a few rows, then measure the time of a step. The
        rows use cells after the stored tokens. The next draft overwrites these cells."""
        free = [slot for slot, stored in enumerate(self._stored) if len(stored) < self._model.n_ctx]
        if not self.seconds:
            for n in [n for n in ROWS if n <= len(free)]:
                self._model.best([self._row_after(slot) for slot in free[:n]], self._p_min > 0)
            for n in (*ROWS[1:], SINK + SHORT):
                if n <= min(self._model.n_ubatch, self._model.n_ctx):
                    self._model.best(
                        [Rows(free[0], self._model.rewind(free[0], 0), [0] * n)], self._p_min > 0
                    )
            for _ in range(N_MEASURED):
                self._best([self._row_after(free[0])])
            for _ in range(N_MEASURED):
                n = min(N_PROMPT, self._model.n_ubatch, self._model.n_ctx)
                self._best([Rows(free[0], self._model.rewind(free[0], 0), [0] * n)])
            self._measure_at = self._clock() + self.seconds / MEASURED_SHARE
        elif free and not self._is_busy() and (began := self._clock()) > self._measure_at:
            self._best([self._row_after(free[0])])
            # A step may be delayed and take longer than `seconds`.
            self._measure_at = self._clock() + (self._clock() - began) / MEASURED_SHARE
        return True

    def _row_after(self, slot: int) -> Rows:
        stored = self._stored[slot]
        n = self._model.rewind(slot, len(stored))
        del stored[n:]
        return Rows(slot, n, [0], undoes=True)

    def source_of(self, want: Want) -> str:
        stored, n = self._stored[want.slot], len(want.tokens)
        if self._numbers[want.slot] != want.number:
            n -= n_common(stored, want.tokens, n - 1)
        elif (gap := self._gaps[want.slot]).n:
            n -= gap.start
        else:
            n -= len(stored)
        return self.source if n <= self._paid(want) else GAPPED

    def _paid(self, want: Want) -> float:
        """Return how many rows may be computed before a draft."""
        return max(SINK + SHORT, want.spend_s / self._row_s if self._row_s else len(want.tokens))

    def owed(self, wants: Sequence[Want]) -> float:
        n_rows = 0
        for want in wants:
            stored, n = self._stored[want.slot], len(want.tokens) - 1
            if self._numbers[want.slot] != want.number:
                n_missing = n - n_common(stored, want.tokens, n)
            else:
                n_missing = max(0, n - self._gaps[want.slot].n - len(stored))
            n_rows += min(n_missing, SINK + SHORT)
        return max(self._row_s * n_rows, self.seconds if n_rows > ROWS[-1] else 0.0)

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        drafts: list[list[int]] = [[] for _ in wants]
        rows = [] if self._is_busy() else self._caught_up(wants)
        while rows:
            tokens, chances = self._best([row for _, row in rows])
            following: list[tuple[int, Rows]] = []
            for at, (i, row) in enumerate(rows):
                token, end = int(tokens[at]), row.first + len(row.tokens)
                self._stored[row.slot] += row.tokens
                if token >= self._n_vocab or (chances is not None and chances[at] < self._p_min):
                    continue
                drafts[i].append(token)
                if len(drafts[i]) < wants[i].n and end < self._model.n_ctx:
                    following.append((i, Rows(row.slot, end, [token])))
            rows = following
        sources = [GAPPED if self._gaps[want.slot].n else self.source for want in wants]
        return [Draft(tokens, source) for tokens, source in zip(drafts, sources, strict=True)]

    def _caught_up(self, wants: Sequence[Want]) -> list[tuple[int, Rows]]:
        """Return the missing rows of each sequence, to compute before its draft. If a sequence misses more
        rows than fit the step, compute some of them now and draft nothing for the sequence."""
        ready: list[tuple[int, Rows]] = []
        n_left = self._model.n_ubatch
        for i, want in enumerate(wants):
            tokens, n = self._followed(want)
            missing = tokens[n:]
            if len(tokens) > self._model.n_ctx or max(missing) >= self._n_vocab:
                continue
            if len(missing) <= n_left:
                n_left -= len(missing)
                ready.append((i, Rows(want.slot, n, missing, undoes=True)))
            elif n_left > 1:
                part = missing[: min(n_left, len(missing) - 1)]
                n_left -= len(part)
                self._best([Rows(want.slot, n, part)])
                self._stored[want.slot] += part
        return ready

    def _followed(self, want: Want) -> tuple[Sequence[int], int]:
        """Return the tokens that the draft model follows, and how many of them are computed. Decide which
        tokens it skips."""
        slot, tokens = want.slot, want.tokens
        if self._numbers[slot] != want.number:
            self._numbers[slot], self._gaps[slot] = want.number, Gap()
        gap, paid = self._gaps[slot], self._paid(want)
        # A context shift removes tokens from the middle, so the end of the skipped tokens may be after the
        # last token.
        fits = len(tokens) - gap.start <= paid and len(tokens) <= self._model.n_ctx
        if gap.n and (fits or gap.end >= len(tokens)):
            gap = Gap()
        left, n = self._rewound(slot, gap.left(tokens))
        if len(left) - n > paid:
            most = max(rows for rows in PAID_ROWS if rows <= paid)
            # If a recurrent state cannot go back to the gap, it begins again at position 0.
            for start in (gap.start if gap.n else n, 0):
                gap = Gap(max(start, SINK), len(tokens) - most + (SINK if start < SINK else 0))
                left, n = self._rewound(slot, gap.left(tokens))
                if len(left) - n <= paid:
                    break
        self._gaps[slot] = gap
        return left, n

    def _rewound(self, slot: int, tokens: Sequence[int]) -> tuple[Sequence[int], int]:
        stored = self._stored[slot]
        n = self._model.rewind(slot, n_common(stored, tokens, len(tokens) - 1))
        del stored[n:]
        return tokens, n

    def _best(self, rows: Sequence[Rows]) -> tuple[np.ndarray, np.ndarray | None]:
        began = self._clock()
        result = self._model.best(rows, self._p_min > 0)
        seconds, n = self._clock() - began, sum(len(row.tokens) for row in rows)
        if n == len(rows):
            self._times.add(seconds)
        elif n > ROWS[-1]:
            self._row_s = min(self._row_s or seconds / n, seconds / n)
        self.spent_s += max(self.seconds, self._row_s * n if n > ROWS[-1] else 0.0)
        return result

    def took(self, slot: int, n_accepted: int) -> None:
        """Do nothing, because the next draft compares tokens."""

    def close(self) -> None:
        self._model.close()
