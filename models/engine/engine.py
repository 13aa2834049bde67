"""Runs many sequences with continuous batching in the slots of one runner.

Engine and caller exchange only messages, so the engine can run in its own process. The engine knows tokens,
slots and sampling, but no text and no devices.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from vkbackend.errors import DeviceLost, Timeout, UnsupportedModel, VkbackendError
from vkbackend.meta.load import Progress
from vkbackend.models.engine.admission import check_request, max_text, sequence_of
from vkbackend.models.engine.budget import PrefillBudget
from vkbackend.models.engine.cache.host_tier import tier_of
from vkbackend.models.engine.cache.prefix_cache import PrefixCache
from vkbackend.models.engine.drafters import open_draft, speculation_of
from vkbackend.models.engine.grammars import Grammars
from vkbackend.models.engine.idle_work import IdleWork
from vkbackend.models.engine.in_flight import StepInFlight, images_of, rows_of, wanted_of
from vkbackend.models.engine.messages import (
    Cancel,
    Close,
    CopySlot,
    Embed,
    EncodeTile,
    EngineInfo,
    EraseSlot,
    ErrorData,
    Event,
    Generate,
    LoadState,
    Logits,
    Memory,
    News,
    Pause,
    Request,
    Resume,
    SaveState,
    SetVocabulary,
    Stats,
)
from vkbackend.models.engine.projectors import open_projector, projector_words
from vkbackend.models.engine.runner.micro_batch import MicroBatch
from vkbackend.models.engine.scheduler import Scheduler
from vkbackend.models.engine.sequence import Batch, Sequence, is_full, shift_of
from vkbackend.models.engine.slot_requests import SlotRequests
from vkbackend.models.engine.speculation import Speculation
from vkbackend.models.engine.step_results import StepResults
from vkbackend.models.engine.step_times import Mark, StepTimes
from vkbackend.models.engine.waiting import Deadlines, Waiting, late
from vkbackend.models.options import Options
from vkbackend.models.placement.resident import Resident
from vkbackend.models.vision.projector import Projector

if TYPE_CHECKING:
    from vkbackend.models.engine.runner.group import Group
    from vkbackend.models.engine.runner.runner import Runner


class Engine:
    """`submit` waits for the steps in flight if the request reads or writes a slot. `step` starts as many
    micro-batches as the runner accepts, and waits for the oldest."""

    def __init__(
        self,
        runner: Runner,
        budget: PrefillBudget | None = None,
        speculation: Speculation | None = None,
        projector: Projector | None = None,
    ) -> None:
        self._projector = projector
        self.runner, states = runner, runner.states
        share = runner.options.prefix_cache
        self.cache = PrefixCache(runner.pools, runner.n_slots, runner.set_block, states, share=share)
        if states:
            states.spare = self.cache.snapshots.spare
        self._speculation, self._reads_images = speculation, runner.image_width > 0
        self._tier = tier_of(runner, self.cache)
        self._broken: ErrorData | None = None
        self.idle = IdleWork(runner, self._tier, lambda: self._broken is not None)
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
            speculation=speculation,
            max_hidden=runner.max_hidden,
            encodes=runner.encodes,
            restoring=self._tier.restoring if self._tier else None,
        )
        self.grammars = Grammars(runner.n_vocab, runner.max_outputs)
        self._slots = SlotRequests(runner, self.cache, self.scheduler)
        self._results = StepResults(runner, self.cache, speculation)
        self._times = StepTimes(runner)
        self._by_id: dict[int, Sequence] = {}
        self._deadlines = Deadlines()
        self._news = News()
        self._n_submitted = 0
        self._in_flight: deque[StepInFlight] = deque()
        self.is_stuck = False  # whether the last call of `step` computed no rows

    @classmethod
    def open(cls, options: Options, progress: Progress | None = None, group: Group | None = None) -> Engine:
        from vkbackend.models.engine.runner.runner import Runner

        with ExitStack() as opened:  # closes everything after an error
            residents = list[Resident]()
            if (draft := open_draft(options)) is not None:
                opened.callback(draft.close)
                residents.append(Resident.opened("draft model", draft.mesh.devices))
            if (projector := open_projector(options, residents)) is not None:
                opened.callback(projector.close)
                residents.append(projector.resident)
            runner = Runner(options, progress=progress, group=group, residents=residents)
            if projector and len(projector_words(options)) > 1:
                runner.notes.append(f"the projector is on {projector.resident.devices[0].name}")
            engine = cls.of(runner, draft, projector)
            opened.pop_all()
        return engine

    @classmethod
    def of(cls, runner: Runner, draft: Runner | None = None, projector: Projector | None = None) -> Engine:
        """Serve a model. The engine closes `draft`, its draft model, and `projector`. After an error, the
        runner is closed."""
        try:
            return cls(runner, speculation=speculation_of(runner, draft), projector=projector)
        except BaseException:
            runner.close()
            raise

    @property
    def info(self) -> EngineInfo:
        r = self.runner
        names = r.device_names()
        lines = r.prediction.lines(names) if r.prediction else []
        sizes = r.n_vocab, r.n_ctx, r.n_slots, r.n_ubatch
        return EngineInfo(
            *sizes,
            tuple(names),
            tuple(lines),
            tuple(r.notes),
            r.adapters,
            r.encodes,
            max_text(r),
            r.image_width,
        )

    @property
    def busy(self) -> bool:
        return bool(self._news) or bool(self._by_id) or bool(self._in_flight)

    def stats(self) -> dict[str, Any]:
        return {
            **self.scheduler.stats(),
            **self.cache.usage().stats(),
            "n_waiting": len(self.scheduler.waiting) + len(self.grammars),
            "n_requests": self._n_submitted,
            **self._times.report(),
            **(self._speculation.stats() if self._speculation else {}),
            **self._results.stats(),
            **self.runner.expert_stats(),
            **(self._tier.stats() if self._tier else {}),
        }

    def close(self) -> None:
        """Unfinished requests get no further events. `close` may be called twice."""
        if self._tier is not None:
            tier, self._tier = self._tier, None
            with suppress(VkbackendError):  # a device may fail while its blocks are read
                tier.close(keeps=not (self._broken or self._in_flight))
        self._by_id.clear()
        self._in_flight.clear()
        self.scheduler.running.clear()
        self.scheduler.waiting = Waiting()
        self._news = News()
        self._broken = ErrorData("VkbackendError", "the engine is closed")
        self.grammars.close()
        if self._speculation is not None:
            self._speculation.close()
        if self._projector is not None:
            self._projector.close()
        self.runner.close()

    def submit(self, request: Request) -> None:
        """Errors of the request become an event."""
        match request:
            case Generate() | Logits() | Embed():
                self._accept(request)
            case Cancel():
                if (sequence := self._by_id.get(request.id)) is not None:
                    self._end(sequence)
            case Pause() | Resume():
                if (sequence := self._by_id.get(request.id)) is not None:
                    sequence.is_paused = isinstance(request, Pause)
            case SaveState() | LoadState() | CopySlot() | EraseSlot():
                self._add(request.id, partial(self._run_on_slot, request))
            case SetVocabulary():
                self.grammars.set_vocabulary(request.vocabulary)
                self._news.add(Event(request.id))
            case EncodeTile():
                self._add(request.id, partial(self._encode, request))
            case Memory():
                rows = [self._projector.memory()] if self._projector else []
                self._news.add(Event(request.id, memory=[*self.runner.memory(), *rows]))
            case Stats():
                self._news.add(Event(request.id, stats=self.stats()))
            case Close():
                self.close()

    def _accept(self, request: Generate | Logits | Embed) -> None:
        n_waiting = len(self.scheduler.waiting) + len(self.grammars)
        try:
            self._check_whole()
            check_request(request, self.runner, n_waiting)
            sequence = sequence_of(request, self._n_submitted, self.runner)
            has_to_wait = self.grammars.compile(sequence)
        except VkbackendError as error:
            self._news.add(Event(request.id, error=ErrorData.of(error)))
            return
        self._n_submitted += 1
        self._by_id[request.id] = sequence
        if not has_to_wait:
            self.scheduler.waiting.add(sequence)
        if request.deadline_s is not None:
            self._deadlines.add(sequence, sequence.born + request.deadline_s)

    def _run_on_slot(self, request: SaveState | LoadState | CopySlot | EraseSlot) -> Event:
        while self._in_flight:  # steps in flight still write into slots
            self._land()
        self._check_whole()
        try:
            return Event(request.id, slot=request.slot, tokens=self._slots.run(request))
        except MemoryError as error:  # numpy cannot allocate a copy of the state
            message = f"slot {request.slot}: the host has too little memory for its state ({error})"
            return Event(request.id, error=ErrorData("StateError", message))

    def _encode(self, request: EncodeTile) -> Event:
        self._check_whole()
        if self._projector is None:
            raise UnsupportedModel("the model was opened without a projector (mmproj)")
        rows = self._projector.encode_tile(request.key, request.index, request.tile)
        return Event(request.id, image=rows)

    def _check_whole(self) -> None:
        if self._broken:
            raise self._broken.exception()

    def _add(self, id_: int, answer: Callable[[], Event]) -> None:
        """Send the request `id_` the result of `answer`, or the error that it raises."""
        try:
            self._news.add(answer())
        except VkbackendError as error:
            if isinstance(error, DeviceLost | Timeout):
                self._broken = ErrorData.of(error)
            self._news.add(Event(id_, error=ErrorData.of(error)))

    def step(self) -> News:
        if self._deadlines:
            for sequence in self._deadlines.passed(time.monotonic()):
                self._fail_one(sequence, late(sequence))
        if self.grammars:
            for sequence, error in self.grammars.compiled():
                self.scheduler.waiting.add(sequence)
                if error:
                    self._fail_one(sequence, error)
        try:
            if self.scheduler.free and self.scheduler.waiting:
                self.scheduler.admit()
                while self.scheduler.begun:
                    self._news.add(self.scheduler.begun.pop(0))
            if self.runner.options.context_shift:
                self._shift()
            n_steps = self.runner.n_in_flight
            while len(self._in_flight) < n_steps:
                composed = self._times.mark()
                if not (batch := self.scheduler.compose(n_steps)):
                    break
                self._launch(batch, composed)
        except VkbackendError as error:
            self._fail([], error)
        self.is_stuck = not self._in_flight and not self.scheduler.restores
        if self._in_flight:
            self._land()
        news, self._news = self._news, News()
        return news

    def _shift(self) -> None:
        n_ctx = self.runner.n_ctx
        if any(is_full(sequence, n_ctx) for sequence in self.scheduler.running):
            while self._in_flight:
                self._land()
        for sequence in [s for s in self.scheduler.running if is_full(s, n_ctx)]:
            n_kept, n_discarded = shift_of(sequence, n_ctx)
            used = n_kept + n_discarded
            has_cells = sequence.slot >= 0 and self.scheduler.make_own(sequence, n_kept, used)
            if has_cells:
                self.runner.shift(sequence.slot, used, sequence.n_stored, n_discarded)
            sequence.shift(n_kept, n_discarded)
            if has_cells:
                self.cache.end_shift(sequence.slot, sequence.n_stored)

    def _launch(self, batch: Batch, composed: Mark) -> None:
        tokens, runs, outputs, n_decode = rows_of(batch)
        images = images_of(batch, tokens, runs) if self._reads_images else None
        began = self._times.mark()
        try:
            masks = self.grammars.masks(batch)
            wanted = wanted_of(batch, self.runner.max_top_k)
            stage = batch[0][0].stage
            rows = MicroBatch(tokens, runs, outputs, masks if wanted.top_k else None, stage, images)
            step = self.runner.launch(rows, wanted)
        except VkbackendError as error:
            self._fail(batch, error)
            return
        for sequence, *_ in batch:
            sequence.in_flight = True
        self._in_flight.append(StepInFlight(batch, step, composed, began, len(tokens), n_decode))

    def _land(self) -> None:
        step = self._in_flight.popleft()
        try:
            rows = self.runner.collect(step.handle)
        except VkbackendError as error:
            self._fail(step.batch, error)
            return
        cost = self._times.end(step.composed, step.began, step.n_rows)
        if not cost.recorded:
            self.scheduler.budget.took(step.n_decode, step.n_rows - step.n_decode, cost.step_s)
            if self._speculation is not None and step.n_decode == step.n_rows:
                self._speculation.learn(step.n_rows, cost.step_s)
        for sequence in self._results.take(step.batch, rows, cost, self._news):
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        sequence.is_over = True
        del self._by_id[sequence.request.id]
        if sequence.in_flight:  # the step in flight advances the recurrent state past `n_stored`
            sequence.n_stored = self.runner.settle(sequence.slot, sequence.n_stored)
        if sequence.slot >= 0:
            self.scheduler.release(sequence)
        elif not self.grammars.forget(sequence):
            self.scheduler.waiting.forget()

    def _fail(self, batch: Batch, error: VkbackendError) -> None:
        """End the batch's requests. A lost device or a timeout ends all requests and makes the engine
        unusable."""
        failed = [sequence for sequence, *_ in batch if not sequence.is_over]
        if isinstance(error, DeviceLost | Timeout):
            self._broken = ErrorData.of(error)
            self._in_flight.clear()
            failed = list(self._by_id.values())
        for sequence in failed:
            if sequence.slot >= 0:
                # The step may have left a recurrent state partly written.
                sequence.n_stored = self.runner.settle(sequence.slot, sequence.n_stored)
            self._fail_one(sequence, error)

    def _fail_one(self, sequence: Sequence, error: VkbackendError) -> None:
        self._news.add(sequence.failure(error))
        self._end(sequence)
