"""Drafts by a smaller model with the same vocabulary (speculative decoding, Leviathan et al. 2023,
arXiv:2211.17192).

The draft model follows each sequence in a slot of its own. It computes the tokens that it lacks before it
drafts, so a prompt does not wait for it. Drafted tokens are the likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np

from vkbackend.models.common_prefix import n_common
from vkbackend.models.drafting.drafter import Draft, Want

WEIGHT = 0.25  # weight of the last step in the mean time


class Rows(NamedTuple):
    """Consecutive tokens of a slot, from position `first` on. If `undoes` is set, the slot can go back to
    this position after more rows."""

    slot: int
    first: int
    tokens: Sequence[int]
    undoes: bool = False


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
    flight; then nothing is drafted. `seconds` is the mean time of a step, or 0 before the second step."""

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
        self._sizes: set[int] = set()  # The first step of a size is recorded, so it takes longer.
        self.seconds = 0.0

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        drafts: list[list[int]] = [[] for _ in wants]
        rows = [] if self._is_busy() else self._caught_up(wants)
        while rows:
            began = self._clock()
            tokens, chances = self._model.best([row for _, row in rows], self._p_min > 0)
            if all(len(row.tokens) == 1 for _, row in rows):
                self._measured(len(rows), self._clock() - began)
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
        return [Draft(tokens, self.source) for tokens in drafts]

    def _caught_up(self, wants: Sequence[Want]) -> list[tuple[int, Rows]]:
        """Return the last rows before the drafts. If a sequence lacks more rows than a step has, compute some
        of them now and draft nothing for it."""
        ready: list[tuple[int, Rows]] = []
        n_left = self._model.n_ubatch
        for i, want in enumerate(wants):
            stored, tokens = self._stored[want.slot], want.tokens
            n = n_common(stored, tokens, len(tokens) - 1)
            n = self._model.rewind(want.slot, n)
            del stored[n:]
            missing = list(tokens[n:])
            if len(tokens) > self._model.n_ctx or max(missing) >= self._n_vocab:
                continue
            if len(missing) <= n_left:
                n_left -= len(missing)
                ready.append((i, Rows(want.slot, n, missing, undoes=True)))
            elif n_left > 1:
                part = missing[: min(n_left, len(missing) - 1)]
                n_left -= len(part)
                self._model.best([Rows(want.slot, n, part)], False)
                stored += part
        return ready

    def _measured(self, n: int, seconds: float) -> None:
        if n in self._sizes:
            self.seconds += (WEIGHT if self.seconds else 1.0) * (seconds - self.seconds)
        self._sizes.add(n)

    def took(self, slot: int, n_accepted: int) -> None:
        """The next draft compares tokens."""

    def close(self) -> None:
        self._model.close()
