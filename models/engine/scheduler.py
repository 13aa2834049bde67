"""Assigns requests to slots, and chooses the rows of the next step.

A request skips its cached prefix. Without a free cache block, the youngest request is preempted and runs
again later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from vkbackend.models.common_prefix import n_common
from vkbackend.models.engine.budget import PrefillBudget
from vkbackend.models.engine.cache.blocks import Copy, SlotContent
from vkbackend.models.engine.cache.mark import n_alike, next_start
from vkbackend.models.engine.cache.prefix_cache import PrefixCache
from vkbackend.models.engine.cache.prefix_tree import Node
from vkbackend.models.engine.cache.restoring import Restoring
from vkbackend.models.engine.messages import Event
from vkbackend.models.engine.sequence import Batch, Sequence
from vkbackend.models.engine.speculation import Speculation
from vkbackend.models.engine.waiting import Waiting
from vkbackend.ops import CELL_BLOCK

MAX_RESTORES = 3  # After this many restores, a prompt is computed, even if parts of it are stored.


def _turn(sequence: Sequence) -> tuple[int, int]:
    return sequence.served, sequence.number


@dataclass(slots=True)
class RowsLeft:
    """Rows of a step that are still free. One row and one output are reserved for each of the `n_decode`
    decoding sequences that follow."""

    n: int
    n_prompt: int  # rows that prompts may still get
    n_outputs: int
    n_decode: int
    cuts: bool = True  # Whether a step may compute a part of a prompt. An encoder needs the complete text.

    def rows_for(self, sequence: Sequence, decodes: bool, is_recurrent: bool) -> int:
        if not self.cuts:
            n = sequence.n_wanted
            return n if n <= self.n and sequence.n_outputs(n) <= self.n_outputs else 0
        n = min(sequence.n_wanted, self.n, max(1, self.n - self.n_decode))
        if not decodes:
            n = min(n, self.n_prompt)
            if sequence.mark:  # All rows of a run have the same adapters.
                n = min(n, next_start(sequence.mark, sequence.n_stored) - sequence.n_stored)
            # Recurrent layers resume only where a state was stored. A prompt therefore pauses after its last
            # full block.
            start, last = sequence.n_stored, (len(sequence.tokens) - 1) // CELL_BLOCK * CELL_BLOCK
            if is_recurrent and start < last < start + n:
                n = last - start
            if sequence.images:
                n_free = min(self.n, max(1, self.n - self.n_decode))
                n = sequence.images.fitting(start, n, n_free)
        n_outputs = min(self.n_outputs, max(1, self.n_outputs - self.n_decode))
        if sequence.n_outputs(n) <= n_outputs:
            return n
        if sequence.needs_all_rows:
            return min(n, n_outputs)
        n -= self.n_outputs == 0  # the last row of a prompt needs an output
        return sequence.images.fitting(sequence.n_stored, n, n) if sequence.images else n

    def take(self, n: int, n_outputs: int, decodes: bool) -> None:
        self.n -= n
        self.n_prompt -= 0 if decodes else n
        self.n_outputs -= n_outputs


class Scheduler:
    """A step has at most `n_ubatch` rows, and `max_outputs` rows with logits or `max_hidden` with hidden
    states. If `encodes`, a text is computed in one step."""

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
        speculation: Speculation | None = None,
        max_hidden: int = 0,
        encodes: bool = False,
        restoring: Restoring | None = None,
    ) -> None:
        self.cache, self.waiting, self.budget = cache, Waiting(), budget or PrefillBudget()
        self.speculation = speculation
        self.running: list[Sequence] = []
        self.contents = [SlotContent() for _ in range(n_slots)]  # of idle slots
        self.free = set(range(n_slots))
        self.n_preempted = 0
        self.begun: list[Event] = []  # Progress events of new prompts.
        self._n_ubatch, self._max_outputs = n_ubatch, max_outputs
        self._max_hidden, self._encodes = max_hidden, encodes
        self._resume_at, self._copy_blocks = resume_at, copy_blocks
        self._is_recurrent, self._share, self._restoring = is_recurrent, share, restoring
        # the next request needs blocks, and none was freed since the last try
        self._is_blocked = False

    def content(self, slot: int) -> SlotContent:
        for sequence in self.running:
            if sequence.slot == slot:
                if sequence.restore:
                    return SlotContent()
                if sequence.has_moved_cells:  # shifted K and V differ from computed K and V
                    return SlotContent(
                        sequence.tokens[: sequence.n_kept], sequence.n_kept, mark=sequence.mark
                    )
                n = sequence.n_stored
                return SlotContent(sequence.tokens[: n + 1], n, self.cache.resumable(slot), sequence.mark)
        if not self.cache.holds(slot):
            self.contents[slot] = SlotContent()
        return self.contents[slot]

    def admit(self) -> None:
        """If a device fails, the request remains in the queue."""
        while self.free and not self._is_blocked and (first := self.waiting.pop(self.free)) is not None:
            is_in = False
            try:
                is_in = self._start(first)
            finally:
                if not is_in:
                    self.waiting.add(first)
            self._is_blocked = not is_in

    def _start(self, sequence: Sequence) -> bool:
        """Return False if too few blocks are left."""
        tokens, wanted = sequence.tokens, sequence.wanted_slot
        path = self.cache.match(tokens[: sequence.sharable + 1], sequence.mark) if self._share else []
        idle = self.cache.idle() if wanted is None else [wanted]
        slot, n = -1, 0
        if self._share or wanted is not None:
            slot, n = self._longest(idle, sequence, path)
        restore = None
        if self._restoring and sequence.n_restores < MAX_RESTORES:
            n_known = max(len(path), n // CELL_BLOCK)
            restore = self._restoring.find(tokens, sequence.sharable, sequence.mark, n_known)
        if restore or n <= CELL_BLOCK * len(path):
            slot, n = idle[0], CELL_BLOCK * len(path)
            self.cache.begin(slot, path)
        else:
            self.cache.claim(slot)
            copies = self.cache.cut(slot, n)
            if copies is None:  # `cut` has emptied the slot to free blocks.
                self._leave(slot, SlotContent())
                return self._start(sequence)
            if copies:
                self._copy_blocks(copies)
        if not self.cache.reserve(slot, len(tokens), group=0):
            self.cache.drop(slot)
            self._leave(slot, SlotContent())
            return False
        if restore and self._restoring:
            sequence.n_restores += 1
            if not self._restoring.begin(restore, slot, len(path)):
                self.cache.drop(slot)
                self._leave(slot, SlotContent())
                return self._start(sequence)
            sequence.restore = restore
        self.free.discard(slot)
        sequence.slot, sequence.n_stored, sequence.room = slot, n, 0
        self.cache.prompt_tokens += len(tokens)
        self.cache.shared_tokens += n
        sequence.n_cached, sequence.started = n, time.monotonic()
        self.running.append(sequence)
        if (progress := sequence.progress()) is not None:
            self.begun.append(progress)
        return True

    def _longest(self, idle: list[int], sequence: Sequence, path: list[Node]) -> tuple[int, int]:
        """Return the idle slot with the longest prefix of the sequence, and the prefix's length, which may
        end within a block. Return (-1, 0) if no slot has a prefix."""
        tokens = sequence.tokens
        best = -1, 0
        for slot in idle:
            if not self.cache.holds(slot) or not self.cache.begins_with(slot, path):
                continue
            held = self.contents[slot]
            most = min(sequence.sharable, held.n_stored, n_alike(held.mark, sequence.mark))
            n = self._resume_at(slot, n_common(held.tokens, tokens, most))
            if n > best[1] and n >= self.cache.resumable(slot):
                best = slot, n
        return best

    def release(self, sequence: Sequence) -> None:
        content = self.content(sequence.slot)
        self.running.remove(sequence)
        if sequence.restore:
            self.cache.drop(sequence.slot)
        elif sequence.has_moved_cells:
            self.cache.cut(sequence.slot, sequence.n_kept)
        self._leave(sequence.slot, content)
        if not self.cache.holds(sequence.slot):
            self.contents[sequence.slot] = SlotContent()

    def _leave(self, slot: int, content: SlotContent) -> None:
        self.contents[slot] = content
        self.cache.release(slot)
        self.free.add(slot)
        self._is_blocked = False

    def put(self, slot: int, content: SlotContent) -> None:
        self.contents[slot] = content
        self._is_blocked = False

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.cache.drop(sequence.slot)
        self._leave(sequence.slot, SlotContent())
        sequence.slot, sequence.n_stored, sequence.room, sequence.served = -1, 0, 0, -1
        sequence.has_moved_cells, sequence.restore = False, None
        sequence.draft, sequence.replays = (), False
        self.waiting.add(sequence)
        self.n_preempted += 1

    def make_own(self, sequence: Sequence, first: int, used: int) -> bool:
        """From position `first` on, replace shared blocks by the sequence's own copies, before positions
        `first` to `used` - 1 are discarded. If necessary, preempt sequences, the youngest first. Return False
        if the sequence itself was preempted. No step may be in flight."""
        copies: list[Copy] = []
        while not self.cache.unshare(sequence.slot, first, used, copies):
            youngest = max(self.running, key=lambda s: s.order)
            self._preempt(youngest)
            if youngest is sequence:
                return False
        if copies:
            self._copy_blocks(copies)
        return True

    def stats(self) -> dict[str, int]:
        return {
            "n_running": len(self.running),
            "n_decoding": sum(sequence.decodes for sequence in self.running),
            "n_slots": len(self.contents),
            "n_slots_free": len(self.free),
            "n_preempted": self.n_preempted,
        }

    def compose(self, n_steps: int = 1) -> Batch:
        """Return the rows of the next step, sequences with one row first. Up to `n_steps` steps with
        different sequences may be in flight.

        The sequence that was computed least recently gets rows first. One row is reserved for each decoding
        sequence, and prompts share the other rows within the budget. The first sequence gets a row, unless
        the budget allows no rows for its prompt. This sequence also decides whether the step outputs logits
        or hidden states.
        """
        if self._restoring:
            self._restore(self._restoring)
        line = sorted([s for s in self.running if not (s.is_paused or s.in_flight or s.restore)], key=_turn)
        computed: set[object] = set()  # keys of blocks that steps in flight compute
        if n_steps > 1:
            in_flight = [s for s in self.running if s.in_flight]
            computed.update(self._next_key(s) for s in in_flight if s.n_wanted > 1)
            line = line[: -(-(len(line) + len(in_flight)) // n_steps)]
        if line and line[0].is_embedded:
            batch = self._embedded([s for s in line if s.is_embedded], computed)
            return [entry for entry in batch if entry[0].slot >= 0]
        if any([s.is_embedded for s in line]):
            line = [s for s in line if not s.is_embedded]
        n_decode = sum([s.decodes for s in line])
        if n_decode == len(line) <= min(self._n_ubatch, self._max_outputs):
            batch = self._decoding(line)
        else:
            batch = self._mixed(line, n_decode, computed)
            batch.sort(key=lambda entry: entry[1] > 1)
        return [entry for entry in batch if entry[0].slot >= 0]

    def _restore(self, restoring: Restoring) -> None:
        for sequence in [s for s in self.running if s.restore]:
            restore = sequence.restore
            assert restore is not None
            can_continue = restoring.advance(restore, sequence.tokens, sequence.mark)
            if not can_continue:  # The request begins again, without the part that could not be read.
                self._preempt(sequence)
            elif restore.at == restore.end:
                n = CELL_BLOCK * restore.at
                self.cache.shared_tokens += n - sequence.n_stored
                sequence.n_stored = sequence.n_cached = n
                sequence.restore = None

    @property
    def restores(self) -> bool:
        return any([sequence.restore for sequence in self.running])

    def _decoding(self, line: list[Sequence]) -> Batch:
        if self.speculation is not None:
            self.speculation.draft(line, self.cache.reserve)
        if not any([sequence.draft or sequence.replays for sequence in line]):
            return [(sequence, 1, 1) for sequence in line if self._has_room(sequence, 1)]
        batch: Batch = []
        n_left = self._n_ubatch
        for sequence in line:
            n, end = min(sequence.n_wanted, n_left), sequence.n_stored + sequence.n_wanted
            # A draft takes no blocks of running sequences.
            if sequence.slot < 0 or not self.cache.reserve(sequence.slot, end + len(sequence.draft)):
                sequence.draft = ()
            n += len(sequence.draft)
            if n > 0 and sequence.slot >= 0 and self._has_room(sequence, n):
                n_left -= n
                batch.append((sequence, n, sequence.n_outputs(n)))
        batch.sort(key=lambda entry: entry[1] > 1)
        return batch

    def _mixed(self, line: list[Sequence], n_decode: int, computed: set[object]) -> Batch:
        n_prompt = self._n_ubatch
        if n_decode < len(line):
            waiting = [s.n_wanted for s in line if not s.decodes]
            n_prompt = self.budget.rows(n_decode, n_prompt, waiting)
        left = RowsLeft(self._n_ubatch, n_prompt, self._max_outputs, n_decode)
        batch: Batch = []
        for sequence in line:
            if sequence.slot < 0:
                continue  # This sequence was preempted.
            decodes = sequence.decodes
            left.n_decode -= decodes
            if not decodes and not self._moves_on(sequence, computed):
                continue
            n = left.rows_for(sequence, decodes, self._is_recurrent)
            if n > 0 and self._has_room(sequence, n):
                n_outputs = sequence.n_outputs(n)
                left.take(n, n_outputs, decodes)
                batch.append((sequence, n, n_outputs))
        return batch

    def _embedded(self, line: list[Sequence], computed: set[object]) -> Batch:
        # A text in stages gets separate steps.
        line = line[:1] if line[0].stage >= 0 else [s for s in line if s.stage < 0]
        cuts = not self._encodes or line[0].stage >= 0
        left = RowsLeft(self._n_ubatch, self._n_ubatch, self._max_hidden, 0, cuts)
        batch: Batch = []
        for sequence in line:
            if sequence.slot < 0 or not self._moves_on(sequence, computed):
                continue
            n = left.rows_for(sequence, False, self._is_recurrent)
            if n > 0 and self._has_room(sequence, n):
                n_outputs = sequence.n_outputs(n)
                left.take(n, n_outputs, decodes=False)
                batch.append((sequence, n, n_outputs))
        batch.sort(key=lambda entry: entry[1] > 1)
        return batch

    def _moves_on(self, sequence: Sequence, computed: set[object]) -> bool:
        """Make the prompt use blocks that other sequences have computed. Return False if another sequence
        computes the prompt's next block now."""
        if not sequence.uses_cache:
            return True
        slot, tokens, mark = sequence.slot, sequence.tokens, sequence.mark
        sequence.n_stored = self.cache.extend(slot, tokens, sequence.n_stored, mark)
        key = self._next_key(sequence)
        if key is None or key not in computed:
            computed.add(key)
            return True
        return False

    def _next_key(self, sequence: Sequence) -> object:
        return self.cache.next_key(sequence.slot, sequence.tokens, sequence.n_stored, sequence.mark)

    def _has_room(self, sequence: Sequence, n: int) -> bool:
        """Allocate blocks for the next `n` positions. If necessary, preempt sequences, the youngest first."""
        end = sequence.n_stored + n
        if end <= sequence.room:
            return True
        while not self.cache.reserve(sequence.slot, end):
            youngest = max(self.running, key=lambda s: s.order)
            if youngest.in_flight:
                return False  # Preempt the youngest after its step.
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.room = -(-end // CELL_BLOCK) * CELL_BLOCK
        return True
