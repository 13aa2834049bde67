"""Keeps the most used experts in the slots of all devices, while steps run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from vkbackend import env
from vkbackend.errors import Timeout
from vkbackend.meta.expert_moves import ExpertSlots, Move
from vkbackend.models.experts.replacement import most_used, replacements
from vkbackend.models.experts.uses import Uses

PERIOD = 4  # Steps between two choices.
POLL_S = 1e-3  # While filling.
SAVE_S = 60.0  # An idle engine stores the counts at this interval.

Choose = Callable[[Uses, Sequence[np.ndarray]], Sequence[Move]]


class ExpertCache:
    """`hits` and `misses` count (row, expert) pairs, and `n_replaced` counts copies after the start. The
    counts of earlier runs are stored under `fingerprint`. Every `period` steps, `choose` returns the next
    replacements. By default the most used experts get slots."""

    def __init__(
        self,
        slots: ExpertSlots,
        fingerprint: str,
        *,
        choose: Choose | None = None,
        period: int = PERIOD,
    ) -> None:
        self.slots, self._fingerprint, self.period = slots, fingerprint, period
        n_experts = [table.n_experts for table in slots.tables]
        self.uses = Uses(slots.names, n_experts)
        self.choose: Choose = choose or (lambda uses, resident: replacements(uses, resident, len(n_experts)))
        self._totals = np.zeros(slots.n_counts, np.uint32)
        self._is_resident = np.zeros(sum(n_experts), bool)
        self._n_steps = self._n_rows = self._n_stored = 0
        self._stored_at = time.monotonic()
        self.hits = self.misses = self.n_replaced = 0
        self.warm = self.uses.load(fingerprint)

    def fill(self) -> None:
        """Fill all slots and wait. Raises DeviceLost, Timeout."""
        for layer, experts in enumerate(most_used(self.uses, [t.n_slots for t in self.slots.tables])):
            moves = [Move(layer, slot, expert) for slot, expert in enumerate(experts)]
            while now := self.slots.at_once(moves):
                self._copy(now)
                moves = moves[len(now) :]
        self._note_residents()

    def _copy(self, moves: Sequence[Move]) -> None:
        deadline = time.monotonic() + env.timeout_s()
        self.slots.begin(moves)
        while not self.slots.poll():
            if time.monotonic() > deadline:
                raise Timeout(f"the experts were not copied within {env.timeout_s()} s")
            time.sleep(POLL_S)

    def after_step(self, n_rows: int, halves: bool = False) -> None:
        """Count the uses in the step that has just ended, and replace experts. `halves` is set if the step
        had two halves. No step may be running."""
        self.slots.take_counts(self._totals, halves)
        self._n_steps += 1
        self._n_rows += n_rows
        if self.slots.n_moving or self._n_steps % self.period == 0:
            self._turn()

    def _turn(self) -> None:
        self._settle()
        if n := self.slots.poll():
            self.n_replaced += n
            self._note_residents()
        if not self.slots.n_moving and self._n_steps % self.period == 0:
            if moves := self.slots.at_once(self.choose(self.uses, self.slots.resident)):
                self.slots.begin(moves)
                self._note_residents()
        if env.validation() and (faults := self.slots.faults()):
            raise AssertionError(f"the next step would read experts that are being replaced: {faults}")

    def _settle(self) -> None:
        """Add the counts since experts were last replaced."""
        counts = self.slots.counts_of_experts(self._totals)
        hits = int(counts[self._is_resident].sum())
        self.hits += hits
        self.misses += int(counts.sum()) - hits
        self.uses.add(counts, self._n_rows)
        self._totals[:] = 0
        self._n_rows = 0

    def _note_residents(self) -> None:
        self._is_resident[:] = False
        for first, resident in zip(self.uses.firsts, self.slots.resident, strict=True):
            self._is_resident[first + resident[resident >= 0]] = True

    def stats(self) -> dict[str, int]:
        self._settle()
        counts = {"n_expert_hits": self.hits, "n_expert_misses": self.misses}
        return counts | {"n_experts_replaced": self.n_replaced}

    def due_s(self) -> float | None:
        """Return after how many seconds the counts should be stored, or None if they are."""
        if self._n_stored == self._n_steps:
            return None
        return max(0.0, self._stored_at + SAVE_S - time.monotonic())

    def save(self) -> None:
        """Store the counts for the next start, if steps have run since the last time."""
        if self._n_stored != self._n_steps:
            self._settle()
            self.uses.save(self._fingerprint)
            self._n_stored, self._stored_at = self._n_steps, time.monotonic()
