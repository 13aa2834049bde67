"""The engine: requests in, events out. Continuous batching of many sequences over the slots of one runner.

It speaks in messages (messages.py) and shares no object with its caller, so it runs in the caller's process
or in its own (remote.py). It knows tokens, slots and sampling; no text, no device.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from vkbackend.errors import DeviceLost, InvalidArgument, Timeout, VkbackendError
from vkbackend.models.engine import saved_state
from vkbackend.models.engine.messages import (
    Cancel,
    Close,
    CopySlot,
    EngineInfo,
    ErrorData,
    Event,
    Generate,
    LoadState,
    Logits,
    Memory,
    Progress,
    Request,
    SaveState,
    Timings,
    check_slot,
    check_tokens,
)
from vkbackend.models.engine.saved_state import SlotContent
from vkbackend.models.engine.slot_copy import copy_slot
from vkbackend.models.options import Options
from vkbackend.models.sampling.rows import Choice, choose_rows
from vkbackend.models.sampling.sampler import Sampler
from vkbackend.step import Run

if TYPE_CHECKING:
    from vkbackend.models.engine.runner import Runner


@dataclass(slots=True)
class _Sequence:
    """A request in work: `tokens[:n_stored]` are in the cache of its slot."""

    request: Generate | Logits
    number: int  # order of submission
    tokens: list[int]
    sampler: Sampler | None
    slot: int = -1
    n_stored: int = 0
    resumable: int = 0  # as in SlotContent
    served: int = -1  # number of the last step it had rows in
    timings: Timings = field(default_factory=Timings)

    @property
    def n_wanted(self) -> int:
        """Rows not computed yet: 1 while decoding."""
        return len(self.tokens) - self.n_stored

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - len(self.request.tokens)

    @property
    def wanted_slot(self) -> int | None:
        return self.request.slot if isinstance(self.request, Generate) else None


class Engine:
    """Runs requests on a runner. `submit` never blocks; each `step` runs one micro-batch and returns its
    events.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._free = list(range(runner.n_slots))
        self._contents = [SlotContent() for _ in self._free]  # of free slots: what their last sequence left
        self._events: list[Event] = []
        self._n_submitted = self._n_steps = 0
        self._broken: ErrorData | None = None

    @classmethod
    def open(cls, options: Options, progress: Progress | None = None) -> Engine:
        """Load the model; raises the typed errors of the reader, the plan and the devices."""
        from vkbackend.models.engine.runner import Runner

        return cls(Runner(options, progress=progress))

    @property
    def info(self) -> EngineInfo:
        r = self.runner
        names = r.device_names()
        lines = r.prediction.lines(names) if r.prediction else []
        sizes = r.n_vocab, r.n_ctx, r.n_slots, r.n_ubatch
        return EngineInfo(*sizes, tuple(names), tuple(lines), tuple(r.notes))

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do or to say."""
        return bool(self._events or self._running or self._waiting)

    def submit(self, request: Request) -> None:
        """Take a request; what is wrong with it comes as its error event."""
        if isinstance(request, Close):
            self.close()
        elif isinstance(request, Cancel):
            self._cancel(request.id)
        elif isinstance(request, Memory):
            self._events.append(Event(request.id, memory=self.runner.memory()))
        elif isinstance(request, SaveState | LoadState | CopySlot):
            try:
                self._events.append(Event(request.id, slot=request.slot, tokens=self._state(request)))
            except VkbackendError as error:
                if isinstance(error, DeviceLost | Timeout):
                    self._broken = ErrorData.of(error)
                self._events.append(Event(request.id, error=ErrorData.of(error)))
            except MemoryError as error:  # of numpy, for a copy of the state
                message = f"slot {request.slot}: the host has too little memory for its state ({error})"
                self._events.append(Event(request.id, error=ErrorData("StateError", message)))
        else:
            try:
                if self._broken:
                    raise self._broken.exception()
                check_tokens(request.tokens, self.runner.n_vocab, self.runner.n_ctx)
                if isinstance(request, Generate) and request.slot is not None:
                    check_slot(request.slot, self.runner.n_slots)
            except VkbackendError as error:
                self._events.append(Event(request.id, error=ErrorData.of(error)))
                return
            sampler = Sampler(request.sampling) if isinstance(request, Generate) else None
            self._waiting.append(_Sequence(request, self._n_submitted, list(request.tokens), sampler))
            self._n_submitted += 1

    def step(self) -> list[Event]:
        """Give free slots to waiting requests, run one micro-batch, return what is new."""
        self._waiting = deque([sequence for sequence in self._waiting if not self._start(sequence)])
        if batch := self._compose():
            self._run(batch)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Release the runner; requests in work get no further event. May be called twice."""
        self._waiting.clear()
        self._running.clear()
        self._events.clear()
        self._broken = ErrorData("VkbackendError", "the engine is closed")
        self.runner.close()

    def _cancel(self, request_id: int) -> None:
        self._waiting = deque(s for s in self._waiting if s.request.id != request_id)
        for sequence in [s for s in self._running if s.request.id == request_id]:
            self._release(sequence)

    def _start(self, sequence: _Sequence) -> bool:
        """Give a waiting sequence the slot it wants, or the lowest free one; False if there is none."""
        wanted = sequence.wanted_slot
        if not self._free or (wanted is not None and wanted not in self._free):
            return False
        sequence.slot = self._free[0] if wanted is None else wanted
        self._free.remove(sequence.slot)
        self._running.append(sequence)
        if wanted is not None:
            held = self._contents[wanted]
            same = (a == b for a, b in zip(held.tokens[: held.n_stored], sequence.tokens, strict=False))
            n_common = min(sum(takewhile(bool, same)), len(sequence.tokens) - 1)  # the last one must run
            n_common = self.runner.resume_at(wanted, n_common)
            if n_common >= held.resumable:
                sequence.n_stored, sequence.resumable = n_common, held.resumable
        return True

    def _content(self, slot: int) -> SlotContent:
        """What a slot holds, whether a sequence is at work in it or not."""
        for sequence in self._running:
            if sequence.slot == slot:
                return SlotContent(
                    sequence.tokens[: sequence.n_stored + 1], sequence.n_stored, sequence.resumable
                )
        return self._contents[slot]

    def _state(self, request: SaveState | LoadState | CopySlot) -> tuple[int, ...] | None:
        """Save, or load or copy and return the tokens of the slot; at once, between two steps."""
        if self._broken:
            raise self._broken.exception()
        check_slot(request.slot, self.runner.n_slots)
        content = self._content(request.slot)
        if isinstance(request, SaveState):
            saved_state.save(self.runner, request.path, request.slot, content, request.first, request.last)
            return None
        if isinstance(request, CopySlot):
            self._check_free(request.target)
            if request.target != request.slot:
                # What the target held is gone even where a device fails in the middle.
                self._contents[request.target] = SlotContent([], 0, 0)
                copied = copy_slot(self.runner, request.slot, content, request.target)
                self._contents[request.target] = copied
            return tuple(content.tokens)
        self._check_free(request.slot)
        saved_state.load(self.runner, request.path, request.slot, content)
        return tuple(content.tokens)

    def _check_free(self, slot: int) -> None:
        """Raises InvalidArgument where a sequence is at work in the slot, or waits for it."""
        check_slot(slot, self.runner.n_slots)
        if slot in {s.wanted_slot for s in self._waiting} or slot not in self._free:
            raise InvalidArgument(
                f"slot {slot} is in work, so nothing can be put into it; end what runs there "
                "(close its stream) or take another slot"
            )

    def _release(self, sequence: _Sequence) -> None:
        self._contents[sequence.slot] = self._content(sequence.slot)
        self._running.remove(sequence)
        self._free.append(sequence.slot)
        self._free.sort()  # the lowest slot first, so that equal requests in equal order get equal slots

    def _compose(self) -> list[tuple[_Sequence, int]]:
        """The rows of the next step: (sequence, rows), who waited longest first.

        One row is kept for each sequence that wants just one (decoding), the rest goes to prompts; neither
        the rows nor the outputs of the runner are exceeded, and the first in line always gets something.
        """
        line = sorted(self._running, key=lambda s: (s.served, s.number))
        n_ones = sum(s.n_wanted == 1 for s in line)
        rows, outputs = self.runner.n_ubatch, self.runner.max_outputs
        batch = []
        for sequence in line:
            wanted = sequence.n_wanted
            n_ones -= wanted == 1
            n = min(wanted, rows, max(1, rows - n_ones))
            if isinstance(sequence.request, Logits):
                n = min(n, outputs, max(1, outputs - n_ones))
            elif n == wanted and not outputs:
                n -= 1  # the row that ends a prompt needs an output
            if n > 0:
                rows -= n
                outputs -= self._n_outputs(sequence, n)
                batch.append((sequence, n))
        return batch

    @staticmethod
    def _n_outputs(sequence: _Sequence, n: int) -> int:
        """Output rows when the next `n` rows of a sequence run: all for logits, else the one that ends its
        tokens.
        """
        return n if isinstance(sequence.request, Logits) else int(n == sequence.n_wanted)

    def _run(self, batch: list[tuple[_Sequence, int]]) -> None:
        tokens: list[int] = []
        runs: list[Run] = []
        outputs: list[int] = []
        for sequence, n in batch:
            first, start = len(tokens), sequence.n_stored
            runs.append(Run(sequence.slot, first, n, start))
            sequence.resumable = max(sequence.resumable, self.runner.resumable(start + n))
            tokens += sequence.tokens[start : start + n]
            outputs += range(first + n - self._n_outputs(sequence, n), first + n)
        began, (reduces, reduce_s) = time.perf_counter(), self.runner.reduce_stats()
        try:
            top_k = self._top_k(batch)
            if top_k:
                ids, logits = self.runner.step_top_k(tokens, runs, outputs, top_k)
            else:
                ids, logits = None, self.runner.step(tokens, runs, outputs)
        except VkbackendError as error:
            self._fail(batch, error)
            return
        results: list[tuple[_Sequence, int, dict[str, Any]]] = []
        choices = self._choose(batch, ids, logits)
        row = 0
        for (sequence, n), choice in zip(batch, choices, strict=True):
            n_outputs = self._n_outputs(sequence, n)
            sequence.n_stored += n
            sequence.served = self._n_steps
            own = slice(row, row + n_outputs)
            results.append((sequence, n, self._advance(sequence, logits[own], choice)))
            row += n_outputs
        self._n_steps += 1
        step_s, (reduces_now, reduce_s_now) = time.perf_counter() - began, self.runner.reduce_stats()
        for sequence, n, news in results:
            n_prompt = n if sequence.n_stored <= len(sequence.request.tokens) else 0
            sequence.timings = sequence.timings.plus(
                n_prompt, n - n_prompt, step_s, reduces_now - reduces, reduce_s_now - reduce_s
            )
            if news:
                event = Event(sequence.request.id, slot=sequence.slot, timings=sequence.timings, **news)
                self._events.append(event)
                if news["done"]:
                    self._release(sequence)

    def _top_k(self, batch: list[tuple[_Sequence, int]]) -> int:
        """Candidates per output row that are enough for every sequence of a step; 0: whole rows are."""
        wanted = [
            s.sampler.params.n_candidates if s.sampler else 0 for s, n in batch if self._n_outputs(s, n)
        ]
        if not wanted or 0 in wanted or max(wanted) > self.runner.max_top_k:
            return 0
        return max(wanted)

    def _choose(
        self, batch: list[tuple[_Sequence, int]], ids: np.ndarray | None, logits: np.ndarray
    ) -> list[Choice | None]:
        """The next token of each sequence of a step, None where it wants none."""
        choices: list[Choice | None] = [None] * len(batch)
        drawing, rows, row = [], [], 0
        for place, (sequence, n) in enumerate(batch):
            n_outputs = self._n_outputs(sequence, n)
            if n_outputs and isinstance(sequence.request, Generate) and sequence.request.max_tokens != 0:
                drawing.append(place)
                rows.append(row)
            row += n_outputs
        if drawing:
            if len(rows) < len(logits):
                ids, logits = None if ids is None else ids[rows], logits[rows]
            sequences = [batch[place][0] for place in drawing]
            samplers = [s.sampler for s in sequences if s.sampler]
            for place, choice in zip(
                drawing, choose_rows(samplers, [s.tokens for s in sequences], ids, logits), strict=True
            ):
                choices[place] = choice
        return choices

    def _advance(self, sequence: _Sequence, logits: np.ndarray, choice: Choice | None) -> dict[str, Any]:
        """What the output rows of a step mean for one sequence, whose next token is `choice`: fields of its
        event, {} for none.
        """
        request, n_ctx = sequence.request, self.runner.n_ctx
        if isinstance(request, Logits):
            return {"logits": logits.copy(), "done": sequence.n_wanted == 0}
        if not len(logits):
            return {}
        if request.max_tokens == 0:
            return {"finish_reason": "length", "done": True}
        if isinstance(choice, VkbackendError):
            return {"error": ErrorData.of(choice), "done": True}
        assert choice is not None
        sequence.tokens.append(choice)
        reason = None
        if choice in request.stop_ids:
            reason = "stop"
        elif sequence.n_generated == request.max_tokens or sequence.n_stored >= n_ctx:
            reason = "length"
        return {"token": choice, "finish_reason": reason, "done": reason is not None}

    def _fail(self, batch: list[tuple[_Sequence, int]], error: VkbackendError) -> None:
        """A step failed: its requests end; after a lost device or a timeout nothing can run any more."""
        failed = [sequence for sequence, _ in batch]
        if isinstance(error, DeviceLost | Timeout):
            self._broken = ErrorData.of(error)
            failed = [*self._running, *self._waiting]
            self._waiting.clear()
        for sequence in failed:
            self._events.append(Event(sequence.request.id, error=ErrorData.of(error)))
            if sequence in self._running:
                # The step may have left a recurrent state neither old nor new.
                sequence.n_stored = self.runner.resume_at(sequence.slot, sequence.n_stored)
                self._release(sequence)
