"""The engine: requests in, news out. Continuous batching of many sequences over the slots of one runner.

It speaks in messages (messages.py) and shares no object with its caller, so it may have its own process
(engine_process.py). It knows tokens, slots and sampling, but no text and no device.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from vkbackend.errors import DeviceLost, QueueFull, Timeout, VkbackendError
from vkbackend.models.engine.budget import PrefillBudget
from vkbackend.models.engine.grammars import Grammars
from vkbackend.models.engine.in_flight import Flight, Mark, Rows, rows_of, wanted_of
from vkbackend.models.engine.messages import (
    Cancel,
    Close,
    EngineInfo,
    ErrorData,
    Event,
    Generate,
    Logits,
    Memory,
    News,
    Pause,
    Progress,
    Request,
    Resume,
    SetVocabulary,
    Stats,
    check_slot,
    check_tokens,
)
from vkbackend.models.engine.micro_batch import MicroBatch
from vkbackend.models.engine.prefix_cache import PrefixCache
from vkbackend.models.engine.scheduler import Scheduler
from vkbackend.models.engine.sequence import Batch, Sequence
from vkbackend.models.engine.slot_requests import SlotRequests
from vkbackend.models.engine.step_times import StepTimes
from vkbackend.models.engine.waiting import Deadlines, Waiting, late
from vkbackend.models.options import Options
from vkbackend.models.sampling.logprobs import Logprobs
from vkbackend.models.sampling.rows import Choice, choose_rows
from vkbackend.models.sampling.sampler import Sampler
from vkbackend.ops import CELL_BLOCK

if TYPE_CHECKING:
    from vkbackend.models.engine.runner import Runner


class Engine:
    """Runs requests on a runner. `submit` blocks only for a request that reads or writes a slot: it waits for
    the steps on their way. `step` waits for one micro-batch and returns the news of it. A runner that can
    have several micro-batches on their way gets as many before `step` waits for the first.
    """

    def __init__(self, runner: Runner, budget: PrefillBudget | None = None) -> None:
        self.runner, states = runner, runner.states
        share = runner.options.prefix_cache
        self.cache = PrefixCache(runner.pools, runner.n_slots, runner.set_block, states, share=share)
        if states:
            states.spare = self.cache.spare_state
        self.scheduler = Scheduler(
            self.cache,
            runner.n_slots,
            runner.n_ubatch,
            runner.max_outputs,
            resume_at=runner.resume_at,
            copy_blocks=runner.copy_blocks,
            is_recurrent=states is not None,
            share=share,
            budget=budget,
        )
        self.grammars = Grammars(runner.n_vocab, runner.max_outputs)
        self._slots = SlotRequests(runner, self.cache, self.scheduler)
        self._windowed = any(pool.window for pool in runner.pools)
        self._by_id: dict[int, Sequence] = {}
        self._deadlines, self._times = Deadlines(), StepTimes()
        self._news = News()
        self._n_submitted = self._n_steps = 0
        self._flights: deque[Flight] = deque()
        self._landed = self._mark()  # when the last step landed
        self._reduced = runner.reduce_stats()  # all-reduces until that step
        self.is_stuck = False  # the last step had no rows
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
        return bool(self._news) or bool(self._by_id) or bool(self._flights)

    # ---- requests ----

    def submit(self, request: Request) -> None:
        """Take a request; what is wrong with it comes as its error event."""
        if isinstance(request, Generate | Logits):
            try:
                self._add(request)
            except VkbackendError as error:
                self._tell(Event(request.id, error=ErrorData.of(error)))
        elif isinstance(request, Cancel):
            if (sequence := self._by_id.get(request.id)) is not None:
                self._end(sequence)
        elif isinstance(request, Pause | Resume):
            if (sequence := self._by_id.get(request.id)) is not None:
                sequence.is_paused = isinstance(request, Pause)
        elif isinstance(request, SetVocabulary):
            self.grammars.set_vocabulary(request.vocabulary)
            self._tell(Event(request.id))
        elif isinstance(request, Memory):
            self._tell(Event(request.id, memory=self.runner.memory()))
        elif isinstance(request, Stats):
            self._tell(Event(request.id, stats=self.stats()))
        elif isinstance(request, Close):
            self.close()
        else:
            try:
                while self._flights:  # steps on their way still write into slots
                    self._land()
                # Callers take `tokens` of news before events: who got an event here gets another one next.
                for sequence in self._by_id.values():
                    sequence.told = -1
                if self._broken:
                    raise self._broken.exception()
                self._tell(Event(request.id, slot=request.slot, tokens=self._slots.run(request)))
            except VkbackendError as error:
                if isinstance(error, DeviceLost | Timeout):
                    self._broken = ErrorData.of(error)
                self._tell(Event(request.id, error=ErrorData.of(error)))
            except MemoryError as error:  # of numpy, for a copy of the state
                message = f"slot {request.slot}: the host has too little memory for its state ({error})"
                self._tell(Event(request.id, error=ErrorData("StateError", message)))

    def _add(self, request: Generate | Logits) -> None:
        runner, waiting = self.runner, self.scheduler.waiting
        if self._broken:
            raise self._broken.exception()
        check_tokens(request.tokens, runner.n_vocab, runner.n_ctx)
        if isinstance(request, Generate) and request.slot is not None:
            check_slot(request.slot, runner.n_slots)
        if (n_waiting := len(waiting) + len(self.grammars)) >= runner.options.n_queue:
            raise QueueFull(
                f"{n_waiting} requests wait for one of {runner.n_slots} slots, and no more may (n_queue); "
                "try again later, or open the model with more slots (n_slots)"
            )
        sampler = None
        if isinstance(request, Generate):
            sampler = Sampler(request.sampling, request.structure is not None)
        now = time.monotonic()
        sequence = Sequence(request, self._n_submitted, now, list(request.tokens), sampler)
        has_to_wait = self.grammars.compile(sequence)
        self._n_submitted += 1
        self._by_id[request.id] = sequence
        if not has_to_wait:
            waiting.add(sequence)
        if request.deadline_s is not None:
            self._deadlines.add(sequence, now + request.deadline_s)

    def _tell(self, event: Event) -> None:
        self._news.events.append(event)

    def _end(self, sequence: Sequence) -> None:
        """A request is over, wherever it is."""
        sequence.is_over = True
        del self._by_id[sequence.request.id]
        if sequence.in_flight:  # the step on its way moves the recurrent state on, past `n_stored`
            sequence.n_stored = self.runner.resume_at(sequence.slot, sequence.n_stored)
        if sequence.slot >= 0:
            self.scheduler.release(sequence)
        elif not self.grammars.forget(sequence):
            self.scheduler.waiting.forget()

    def close(self) -> None:
        """Release the runner; requests in work get no further event. May be called twice."""
        self._by_id.clear()
        self._flights.clear()
        self.scheduler.running.clear()
        self.scheduler.waiting = Waiting()
        self._news = News()
        self._broken = ErrorData("VkbackendError", "the engine is closed")
        self.grammars.close()
        self.runner.close()

    def stats(self) -> dict[str, Any]:
        """What it does now, and has done so far."""
        return {
            **self.scheduler.stats(),
            **self.cache.usage().stats(),
            "n_waiting": len(self.scheduler.waiting) + len(self.grammars),
            "n_requests": self._n_submitted,
            "n_steps": self._n_steps,
            "n_reduces": self._reduced[0],
            **self._times.report(),
        }

    # ---- steps ----

    def step(self) -> News:
        """End what is late, give free slots to waiting requests, run one micro-batch, return what is new."""
        if self._deadlines:
            for sequence in self._deadlines.passed(time.monotonic()):
                self._fail_one(sequence, late(sequence))
        if self.grammars:
            for sequence, wrong in self.grammars.compiled():
                self.scheduler.waiting.add(sequence)
                if wrong:
                    self._fail_one(sequence, wrong)
        try:
            if self.scheduler.free and self.scheduler.waiting:
                self.scheduler.admit()
            most = self.runner.n_in_flight
            while len(self._flights) < most and (batch := self.scheduler.compose(most)):
                self._launch(batch)
        except VkbackendError as error:  # of a device that copies a block
            self._fail([], error)
        self.is_stuck = not self._flights
        if self._flights:
            self._land()
        news, self._news = self._news, News()
        return news

    def _launch(self, batch: Batch) -> None:
        tokens, runs, outputs, n_decode = rows_of(batch)
        began = self._mark()
        try:
            masks = self.grammars.masks(batch)
            wanted = wanted_of(batch, self.runner.max_top_k)
            rows = MicroBatch(tokens, runs, outputs, masks if wanted.top_k else None)
            step = self.runner.launch(rows, wanted)
        except VkbackendError as error:
            self._fail(batch, error)
            return
        for sequence, *_ in batch:
            sequence.in_flight = True
        self._flights.append(Flight(batch, step, began, len(tokens), n_decode))

    def _mark(self) -> Mark:
        return Mark(time.perf_counter(), self.runner.n_recorded, self.runner.record_s)

    def _land(self) -> None:
        """Wait for the step that began first, and take what it brought."""
        flight = self._flights.popleft()
        try:
            found: Rows = self.runner.collect(flight.step)
        except VkbackendError as error:
            self._fail(flight.batch, error)
            return
        before, now = self._landed, self._mark()
        self._landed = now
        # With several steps on their way, a step costs the time since the one before it landed.
        since = max(flight.began, before)
        step_s = since.until(now)
        if since.n_recorded == now.n_recorded:
            self.scheduler.budget.took(flight.n_decode, flight.n_rows - flight.n_decode, step_s)
        reduces, reduce_s = self._reduced
        reduces_now, reduce_s_now = self._reduced = self.runner.reduce_stats()
        n_reduces, reduced_s = reduces_now - reduces, reduce_s_now - reduce_s
        self._times.add(step_s, flight.n_rows, n_reduces, reduced_s)
        self._advance(flight.batch, found, flight.began.until(now), n_reduces, reduced_s)
        self._n_steps += 1

    def _advance(self, batch: Batch, found: Rows, step_s: float, n_reduces: int, reduce_s: float) -> None:
        """A step has run: note what is stored, choose the next tokens, tell what there is to tell."""
        drawing: list[Sequence] = []
        rows: list[int] = []
        row = 0
        over: list[Sequence] = []
        always = self._windowed or self.runner.states is not None
        for sequence, n, n_outputs in batch:
            if sequence.is_over:  # meanwhile
                row += n_outputs
                continue
            start = sequence.n_stored
            sequence.in_flight = False
            sequence.n_stored = stored = start + n
            sequence.served = self._n_steps
            if stored <= len(sequence.request.tokens):
                sequence.prompt_n += n
                sequence.prompt_s += step_s
            else:
                sequence.decode_n += n
                sequence.decode_s += step_s
            sequence.n_reduces += n_reduces
            sequence.reduce_s += reduce_s
            if stored % CELL_BLOCK < n or always:
                self.cache.stored(sequence.slot, sequence.tokens, stored)
                if n > 1 or stored <= len(sequence.request.tokens):
                    self.cache.snapshot(sequence.slot, start)
            if n_outputs and not self._gives_rows(sequence, found[1][row : row + n_outputs], over):
                drawing.append(sequence)
                rows.append(row)
            row += n_outputs
        if drawing:
            ids, logits, log_sums = found
            if len(rows) < len(logits):
                ids, logits = None if ids is None else ids[rows], logits[rows]
                log_sums = None if log_sums is None else log_sums[rows]
            samplers = [s.sampler for s in drawing if s.sampler]
            choices = choose_rows(samplers, [s.tokens for s in drawing], ids, logits, log_sums)
            for sequence, choice in zip(drawing, choices, strict=True):
                self._take(sequence, choice, over)
        for sequence in over:
            self._end(sequence)

    def _gives_rows(self, sequence: Sequence, logits: np.ndarray, over: list[Sequence]) -> bool:
        """Answer a request that wants no token: `Logits` gets its output rows, a `Generate` of no tokens its
        end. False for any other."""
        request, is_over = sequence.request, sequence.n_wanted == 0
        if isinstance(request, Logits):
            sequence.n_given += len(logits)
            self._tell(Event(request.id, logits=logits.copy(), done=is_over, slot=sequence.slot))
        elif request.max_tokens == 0:
            self._tell(self._last(sequence, None, "length"))
        else:
            return False
        if is_over:
            over.append(sequence)
        return True

    def _take(self, sequence: Sequence, choice: Choice, over: list[Sequence]) -> None:
        """The next token of a sequence, or what is wrong with its logits."""
        request = sequence.request
        assert isinstance(request, Generate)
        if isinstance(choice, VkbackendError):
            self._tell(Event(request.id, slot=sequence.slot, error=ErrorData.of(choice)))
            over.append(sequence)
            return
        sequence.tokens.append(choice)
        sampler = sequence.sampler
        logprobs = sampler.logprobs if sampler else None
        if choice in request.stop_ids or (sampler and sampler.matcher and sampler.matcher.is_over):
            reason = "stop"
        elif sequence.n_generated == request.max_tokens or sequence.n_stored >= self.runner.n_ctx:
            reason = "length"
        elif request.timed or logprobs is not None:
            event = Event(request.id, done=False, token=choice, slot=sequence.slot, logprobs=logprobs)
            event.timings = sequence.timings() if request.timed else None
            self._tell(event)
            return
        elif sequence.told == sequence.slot:
            self._news.ids.append(request.id)
            self._news.tokens.append(choice)
            return
        else:
            sequence.told = sequence.slot
            self._tell(Event(request.id, done=False, token=choice, slot=sequence.slot))
            return
        self._tell(self._last(sequence, choice, reason, logprobs))
        over.append(sequence)

    def _last(
        self, sequence: Sequence, token: int | None, reason: str, logprobs: Logprobs | None = None
    ) -> Event:
        return Event(
            sequence.request.id,
            token=token,
            finish_reason=reason,
            slot=sequence.slot,
            timings=sequence.timings(),
            logprobs=logprobs,
        )

    # ---- what goes wrong ----

    def _fail(self, batch: Batch, error: VkbackendError) -> None:
        """A step failed: its requests end; after a lost device or a timeout nothing can run any more."""
        failed = [sequence for sequence, *_ in batch if not sequence.is_over]
        if isinstance(error, DeviceLost | Timeout):
            self._broken = ErrorData.of(error)
            self._flights.clear()
            failed = list(self._by_id.values())
        for sequence in failed:
            if sequence.slot >= 0:
                # The step may have left a recurrent state neither old nor new.
                sequence.n_stored = self.runner.resume_at(sequence.slot, sequence.n_stored)
            self._fail_one(sequence, error)

    def _fail_one(self, sequence: Sequence, error: VkbackendError) -> None:
        self._tell(Event(sequence.request.id, slot=sequence.slot, error=ErrorData.of(error)))
        self._end(sequence)
