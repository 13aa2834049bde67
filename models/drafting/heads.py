"""Drafts by a head that is a layer of the model: a multi-token prediction head (architectures/ahead.py) or an
EAGLE-3 head (architectures/eagle3.py).

The head computes one token per sequence and step, and each token is its next input. All sequences share these
steps. The engine reserves the cells of drafted tokens first, because the head stores their K and V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

import numpy as np

from vkbackend.models.drafting.drafter import Adapters, Draft, Want
from vkbackend.models.drafting.prices import Recent


class Head(Protocol):
    """Runs the head on the devices of its model."""

    @property
    def is_idle(self) -> bool: ...

    def draft(
        self,
        tokens: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        summed: bool = False,
        adapters: Sequence[Adapters] = (),
        offsets: Sequence[int] = (),
    ) -> tuple[np.ndarray, np.ndarray | None]: ...


class HeadDrafter:
    """A draft ends before a token that the head finds less probable than `p_min`. `seconds` is the minimum
    recent time of a step of the head, or 0 before the second step."""

    stores = True

    def __init__(
        self,
        head: Head,
        p_min: float = 0.0,
        clock: Callable[[], float] = perf_counter,
        source: str = "mtp",
    ) -> None:
        self._head, self._p_min, self._clock, self.source = head, p_min, clock, source
        self._sizes: set[int] = set()  # The first step of a size is recorded, so it takes longer.
        self._times = Recent()
        self.spent_s = 0.0

    @property
    def seconds(self) -> float:
        return self._times.seconds

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        """Return empty drafts while a step is in flight, as when several nodes work in turn."""
        drafts: list[list[int]] = [[] for _ in wants]
        going = list(range(len(wants))) if self._head.is_idle else []
        while going := [i for i in going if len(drafts[i]) < wants[i].n]:
            last = [drafts[i][-1] if drafts[i] else wants[i].tokens[-1] for i in going]
            positions = [len(wants[i].tokens) - 1 + len(drafts[i]) for i in going]
            slots = [wants[i].slot for i in going]
            adapters = [wants[i].adapters for i in going]
            offsets = [wants[i].rope_offset for i in going]
            began = self._clock()
            tokens, chances = self._head.draft(last, slots, positions, self._p_min > 0, adapters, offsets)
            self._measured(len(going), self._clock() - began)
            if chances is not None:
                likely = chances >= self._p_min
                going, tokens = [i for i, fits in zip(going, likely, strict=True) if fits], tokens[likely]
            for i, token in zip(going, tokens.tolist(), strict=True):
                drafts[i].append(token)
        return [Draft(tokens, self.source) for tokens in drafts]

    def _measured(self, n: int, seconds: float) -> None:
        if n in self._sizes:
            self._times.add(seconds)
        self._sizes.add(n)
        self.spent_s += self.seconds

    def source_of(self, want: Want) -> str:
        return self.source

    def owed(self, wants: Sequence[Want]) -> float:
        return 0.0

    def measure(self) -> bool:
        return False

    def took(self, slot: int, n_accepted: int) -> None:
        """The next step of the model replaces what a draft stored."""

    def close(self) -> None:
        """The runner closes the head."""
