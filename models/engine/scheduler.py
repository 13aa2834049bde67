"""Which request runs in which slot, and which rows the next step has.

Sequences that decode come first, one row each; prompts share what the budget leaves. A request starts behind
the beginning that is already stored. When the cache has no block left, the youngest request is preempted; its
work is found in the cache later, or computed again.
"""

from __future__ import annotations

from collections.abc import Callable

from vkbackend.models.engine.blocks import Copy, Node, SlotContent
from vkbackend.models.engine.budget import PrefillBudget
from vkbackend.models.engine.messages import Logits
from vkbackend.models.engine.prefix_cache import PrefixCache
from vkbackend.models.engine.sequence import Batch, Sequence
from vkbackend.models.engine.waiting import Waiting
from vkbackend.ops import CELL_BLOCK

COMPARED = 256  # tokens compared at once


def _turn(sequence: Sequence) -> tuple[int, int]:
    """Who waited longest comes first."""
    return sequence.served, sequence.number


def n_common(a: list[int], b: list[int], most: int) -> int:
    """How many of the first `most` tokens are equal."""
    most = min(most, len(a), len(b))
    for begin in range(0, most, COMPARED):
        end = min(begin + COMPARED, most)
        if a[begin:end] != b[begin:end]:
            return next(i for i in range(begin, end) if a[i] != b[i])
    return most


class Scheduler:
    """A step has at most `n_ubatch` rows, of which at most `max_outputs` give logits. `resume_at` and
    `copy_blocks` are the runner's methods of these names."""

    def __init__(
        self,
        cache: PrefixCache,
        n_slots: int,
        n_ubatch: int,
        max_outputs: int,
        *,
        resume_at: Callable[[int, int], int],
        copy_blocks: Callable[[list[Copy]], None],
        is_recurrent: bool,
        share: bool,
        budget: PrefillBudget | None = None,
    ) -> None:
        self.cache, self.waiting, self.budget = cache, Waiting(), budget or PrefillBudget()
        self.running: list[Sequence] = []
        self.contents = [SlotContent() for _ in range(n_slots)]  # what their last sequence left in idle slots
        self.free = set(range(n_slots))
        self.n_preempted = 0
        self._n_ubatch, self._max_outputs = n_ubatch, max_outputs
        self._resume_at, self._copy_blocks = resume_at, copy_blocks
        self._is_recurrent, self._share = is_recurrent, share
        self._is_blocked = False  # the next request found no blocks, and none were given back since

    # ---- slots ----

    def content(self, slot: int) -> SlotContent:
        """What a slot holds, whether a sequence is at work in it or not."""
        for sequence in self.running:
            if sequence.slot == slot:
                n = sequence.n_stored
                return SlotContent(sequence.tokens[: n + 1], n, self.cache.resumable(slot))
        if not self.cache.holds(slot):
            self.contents[slot] = SlotContent()
        return self.contents[slot]

    def admit(self) -> None:
        """Start waiting requests while there are free slots and blocks. If a device raises, so does this, and
        the request stays in the queue."""
        while self.free and not self._is_blocked and (first := self.waiting.pop(self.free)) is not None:
            is_in = False
            try:
                is_in = self._start(first)
            finally:
                if not is_in:
                    self.waiting.add(first)
            self._is_blocked = not is_in

    def _start(self, sequence: Sequence) -> bool:
        """Give a sequence a slot and blocks for its tokens; False where there are no blocks."""
        tokens, wanted = sequence.tokens, sequence.wanted_slot
        path = self.cache.match(tokens[: sequence.sharable + 1]) if self._share else []
        idle = self.cache.idle() if wanted is None else [wanted]
        slot, n = -1, 0
        if self._share or wanted is not None:
            slot, n = self._own(idle, tokens, sequence.sharable, path)
        if n <= CELL_BLOCK * len(path):
            slot, n = idle[0], CELL_BLOCK * len(path)
            self.cache.begin(slot, path)
        else:
            self.cache.claim(slot)
            copies = self.cache.cut(slot, n)
            if copies is None:  # what the slot held is gone, and its blocks are there now
                self._leave(slot, SlotContent())
                return self._start(sequence)
            if copies:
                self._copy_blocks(copies)
        if not self.cache.reserve(slot, len(tokens), group=0):
            self.cache.drop(slot)
            self._leave(slot, SlotContent())
            return False
        self.free.discard(slot)
        sequence.slot, sequence.n_stored, sequence.room = slot, n, 0
        self.cache.prompt_tokens += len(tokens)
        self.cache.shared_tokens += n
        self.running.append(sequence)
        return True

    def _own(self, idle: list[int], tokens: list[int], most: int, path: list[Node]) -> tuple[int, int]:
        """The idle slot whose content has the longest beginning in common with the tokens, and that length,
        which may end within a block. (-1, 0): no slot has one."""
        best = -1, 0
        for slot in idle:
            if not self.cache.holds(slot) or not self.cache.begins_with(slot, path):
                continue
            held = self.contents[slot]
            n = self._resume_at(slot, n_common(held.tokens, tokens, min(most, held.n_stored)))
            if n > best[1] and n >= self.cache.resumable(slot):
                best = slot, n
        return best

    def release(self, sequence: Sequence) -> None:
        """A sequence is over; its slot keeps what it holds until that is needed."""
        content = self.content(sequence.slot)
        self.running.remove(sequence)
        self._leave(sequence.slot, content)
        if not self.cache.holds(sequence.slot):
            self.contents[sequence.slot] = SlotContent()

    def _leave(self, slot: int, content: SlotContent) -> None:
        self.contents[slot] = content
        self.cache.release(slot)
        self.free.add(slot)
        self._is_blocked = False

    def put(self, slot: int, content: SlotContent) -> None:
        """An idle slot holds this now."""
        self.contents[slot] = content
        self._is_blocked = False

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.cache.drop(sequence.slot)
        self._leave(sequence.slot, SlotContent())
        sequence.slot, sequence.n_stored, sequence.room, sequence.served = -1, 0, 0, -1
        self.waiting.add(sequence)
        self.n_preempted += 1

    def stats(self) -> dict[str, int]:
        """As `LLM.stats` gives it."""
        return {
            "n_running": len(self.running),
            "n_decoding": sum(sequence.n_wanted == 1 for sequence in self.running),
            "n_slots": len(self.contents),
            "n_slots_free": len(self.free),
            "n_preempted": self.n_preempted,
        }

    # ---- rows ----

    def compose(self, most: int = 1) -> Batch:
        """The rows of the next step, those of sequences with one row first. `most`: how many steps may be on
        their way at once. They share the sequences: no sequence is in two of them.

        The sequence that waited longest comes first. Each sequence that decodes has a row kept for it;
        prompts share the others, as many as the budget allows. A step never exceeds `n_ubatch` rows or
        `max_outputs`. The first in line gets a row, unless it is a prompt and the budget has none for prompts
        in this step.
        """
        line = sorted([s for s in self.running if not (s.is_paused or s.in_flight)], key=_turn)
        taken: set[object] = set()
        if most > 1:
            flying = [s for s in self.running if s.in_flight]
            taken.update(self._next_key(s) for s in flying if s.n_wanted > 1)
            del line[-(-(len(line) + len(flying)) // most) :]
        n_ones = sum([s.n_wanted == 1 for s in line])
        rows, outputs = self._n_ubatch, self._max_outputs
        n_prompt = self.budget.rows(n_ones, rows) if n_ones < len(line) else rows
        if n_ones == len(line) <= min(rows, outputs):
            # All decode: nothing is to be shared out.
            batch = [(sequence, 1, 1) for sequence in line if self._has_room(sequence, 1)]
            return [entry for entry in batch if entry[0].slot >= 0]
        batch = []
        for sequence in line:
            if sequence.slot < 0:
                continue  # it gave way to one before it
            decodes = sequence.n_wanted == 1
            n_ones -= decodes
            if not decodes and not self._moves_on(sequence, taken):
                continue
            n = min(sequence.n_wanted, rows, max(1, rows - n_ones))
            if not decodes:
                n = self._to_boundary(sequence, min(n, n_prompt))
            if sequence.n_outputs(n) > (most := min(outputs, max(1, outputs - n_ones))):
                # A request for logits gets as many rows as there are outputs left. The last row of a prompt
                # needs an output; if none is left, that row waits for the next step.
                n = min(n, most) if isinstance(sequence.request, Logits) else n - (outputs == 0)
            if n <= 0 or not self._has_room(sequence, n):
                continue
            n_outputs = sequence.n_outputs(n)
            rows -= n
            n_prompt -= 0 if decodes else n
            outputs -= n_outputs
            batch.append((sequence, n, n_outputs))
        batch = [entry for entry in batch if entry[0].slot >= 0]
        batch.sort(key=lambda entry: entry[1] > 1)
        return batch

    def _moves_on(self, sequence: Sequence, taken: set[object]) -> bool:
        """Whether a prompt computes its next block in this step. Blocks that other sequences have computed
        meanwhile are taken from the cache first. If another sequence computes the same block now, the prompt
        waits for it."""
        if isinstance(sequence.request, Logits):
            return True
        sequence.n_stored = self.cache.extend(sequence.slot, sequence.tokens, sequence.n_stored)
        key = self._next_key(sequence)
        if key is None or key not in taken:
            taken.add(key)
            return True
        return False

    def _next_key(self, sequence: Sequence) -> object:
        return self.cache.next_key(sequence.slot, sequence.tokens, sequence.n_stored)

    def _to_boundary(self, sequence: Sequence, n: int) -> int:
        """Recurrent layers resume where a state was kept: a prompt pauses behind its last full block."""
        start = sequence.n_stored
        last = (len(sequence.tokens) - 1) // CELL_BLOCK * CELL_BLOCK
        return last - start if self._is_recurrent and start < last < start + n else n

    def _has_room(self, sequence: Sequence, n: int) -> bool:
        """Blocks for the next `n` positions; others give way for them, the youngest first."""
        end = sequence.n_stored + n
        if end <= sequence.room:
            return True
        while not self.cache.reserve(sequence.slot, end):
            youngest = max(self.running, key=lambda s: s.order)
            if youngest.in_flight:
                return False  # its step has to land first, then it gives way
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.room = -(-end // CELL_BLOCK) * CELL_BLOCK
        return True
