"""Runs the steps of a model.

The file is long because a step passes through one class, which saves calls between objects per token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from vkbackend import env
from vkbackend.errors import UnsupportedModel, VkbackendError
from vkbackend.meta.candidates import TopK
from vkbackend.meta.load import Progress
from vkbackend.meta.recorded_steps import Step
from vkbackend.meta.step_kind import StepKind, Wanted, bucket, mix_of
from vkbackend.models.arguments import ONLY_EMBEDS
from vkbackend.models.drafting.drafter import Adapters
from vkbackend.models.engine.cache.block_parts import BlockParts, identity_of
from vkbackend.models.engine.cache.blocks import Copy, Pool
from vkbackend.models.engine.cache.slot_copy import copy_blocks, copy_state
from vkbackend.models.engine.runner.adapter_rows import AdapterRows, width_of
from vkbackend.models.engine.runner.group import Group
from vkbackend.models.engine.runner.image_rows import write_images
from vkbackend.models.engine.runner.likely_steps import likely_kinds
from vkbackend.models.engine.runner.loading import Loading, n_stages
from vkbackend.models.engine.runner.memory_report import memory_report
from vkbackend.models.engine.runner.micro_batch import BatchImages, MicroBatch, Rows, StepHandle
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.engine.runner.rope_rows import RopeRows
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options
from vkbackend.models.placement.recurrent_state import SlotStates
from vkbackend.models.placement.resident import Resident
from vkbackend.open_device import runtime_of
from vkbackend.ops import CELL_BLOCK
from vkbackend.runtime import Device
from vkbackend.step import MAX_RUNS, Mix, Run, StepParams, cut_runs, n_single


class Runner:
    """If `keep_values` is set, every intermediate tensor can be read after a step. `interleave` splits large
    micro-batches in two, so that one part computes while the other part's sums are exchanged. An `interleave`
    of None means True for several physical devices. `group` holds the nodes of the model, with devices named
    NODE/DEVICE. `devices` are already open, and `residents` already loaded.

    After loading, `options` contains the final context length, shares and layers on devices. `prediction`
    contains the expected times.
    """

    def __init__(
        self,
        options: Options,
        gguf: GGUF | None = None,
        *,
        progress: Progress | None = None,
        keep_values: bool = False,
        interleave: bool | None = None,
        group: Group | None = None,
        devices: Sequence[Device] | None = None,
        residents: Sequence[Resident] = (),
    ) -> None:
        # This line comes first, because an unknown name raises an error.
        runtime = runtime_of(options.runtime)
        exact = options.exact or env.exact()
        self.group, self._joining = group, group.joining if group else None
        with GGUF.open(options.path) if gguf is None else nullcontext(gguf) as gguf:
            loading = Loading(gguf, options, self._joining, devices, interleave, residents)
            self.mesh = loading.open(
                lambda names: open_devices(
                    names, runtime, exact=exact, batch_invariant=bool(options.speculation)
                ),
                keep_values=keep_values,
            )
            self._free_before = [device.free_nbytes() for device in self.mesh.devices]
            try:
                loading.plan(self.mesh)
                self._n_places = self.n_in_flight = self._stages(loading)
                self.kv = loading.load(self.mesh, progress, self._n_places)
                self._prepare(loading)
                if group:
                    group.loaded(self.mesh)
            except BaseException:
                self.mesh.close()
                raise

    def _stages(self, loading: Loading) -> int:
        if self._joining is None or not self._joining.leads:
            return 1
        return n_stages(self._joining.nodes.of, loading.options.split_mode, loading.layout)

    def _prepare(self, loading: Loading) -> None:
        self.model, self.options, self.layout = loading.model, loading.options, loading.layout
        self.fingerprint, self.notes, self.prediction = loading.fingerprint, loading.notes, loading.prediction
        self.n_vocab, self.n_ctx = self.model.n_vocab, self.options.n_ctx
        self.n_slots, self.n_ubatch = self.options.n_slots, loading.n_ubatch
        self._shape = shape = loading.shape
        self._tried: set[StepKind] = set()  # kinds that were recorded ahead, or could not be
        self.max_outputs, self.max_top_k = shape.n_outputs, shape.top_k
        self.max_hidden, self.n_embd, self.encodes = shape.n_hidden, self.model.n_embd, shape.encodes
        self.image_width = shape.n_image_tables * self.n_embd
        self._tables = self.kv.groups
        self.expert_cache = loading.expert_cache
        self._params, self._second = StepParams(), StepParams()
        ropes = self.model.ropes(self.n_ctx)
        self._ropes = RopeRows(ropes, self.n_ctx, shape.n_rows)
        self.has_sections = any(table.is_multimodal for table in ropes.values())
        is_even = len(set(self.layout.active.values())) == 1  # all devices compute all layers
        self.n_stages = self.model.n_layer + 1 if self.model.n_staged and is_even else 0
        self.adapters = loading.adapters
        self.default_adapters = tuple((info.id, info.scale) for info in self.adapters if info.scale)
        self._adapter_rows = AdapterRows(shape) if self.adapters else None
        self._logits = np.empty((self.max_outputs, self.n_vocab), np.float32)
        self._shifts = loading.shifting(self.mesh, self.kv)
        self._in_flight: deque[StepHandle] = deque()
        self._n_launched = 0

    def step(self, tokens: Sequence[int], runs: Sequence[Run], outputs: Sequence[int]) -> np.ndarray:
        """Run one micro-batch and return the logits of its output rows, float32 [len(outputs), n_vocab],
        which the next step overwrites. Rows of a run are consecutive positions of one slot."""
        return self.collect(self.launch(MicroBatch(tokens, runs, outputs), Wanted()))[1]

    def step_hidden(self, tokens: Sequence[int], runs: Sequence[Run], outputs: Sequence[int]) -> np.ndarray:
        """Run one micro-batch and return the hidden states of its output rows, float32 [len(outputs),
        n_embd]."""
        return self.collect(self.launch(MicroBatch(tokens, runs, outputs), Wanted(hidden=True)))[1]

    def step_top_k(
        self,
        tokens: Sequence[int],
        runs: Sequence[Run],
        outputs: Sequence[int],
        k: int,
        masks: np.ndarray | None = None,
        summed: bool = False,
    ) -> TopK:
        """Run a step and return the best `k` tokens of each output row, at most `max_top_k`."""
        assert 0 < k and outputs
        handle = self.launch(MicroBatch(tokens, runs, outputs, masks), Wanted(k, summed))
        ids, logits, log_sums = self.collect(handle)
        assert ids is not None
        return TopK(ids, logits, log_sums)

    @property
    def is_idle(self) -> bool:
        """Return whether no step is in flight, so that the head can draft."""
        return not self._in_flight

    def draft(
        self,
        tokens: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        summed: bool = False,
        adapters: Sequence[Adapters] = (),
        offsets: Sequence[int] = (),
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the tokens that the head expects after the token at each slot's position, int64 [n]. If
        `summed`, also return their probabilities, float64 [n]. `adapters` lists each row's adapters, and
        `offsets` how far RoPE's positions are from the cells. The slots must own the positions' cells."""
        runs = [Run(slot, i, 1, at) for i, (slot, at) in enumerate(zip(slots, positions, strict=True))]
        for run, used in zip(runs, adapters, strict=False):
            run.adapters = used
        images = None
        if any(offsets):
            images = BatchImages((), np.repeat(np.add(positions, offsets)[:, None], 3, axis=1))
        batch = MicroBatch(tokens, runs, range(len(runs)), images=images)
        ids, chances = self.best(batch, summed, ahead=True)
        of_head = self.model.draft_ids
        return ids if of_head is None else of_head[ids], chances

    def best(
        self, batch: MicroBatch, summed: bool, *, ahead: bool = False
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the likeliest token of each output row, int64 [n]. If `summed`, also return their
        probabilities, float64 [n]."""
        k = min(1, self.max_top_k)
        wanted = Wanted(k, summed and k > 0, ahead=ahead)
        ids, logits, log_sums = self.collect(self.launch(batch, wanted))
        if ids is None:
            ids = logits.argmax(axis=1, keepdims=True)
            best = np.take_along_axis(logits, ids, 1)
            log_sums = best[:, 0] + np.log(np.exp(logits - best, dtype=np.float64).sum(axis=1))
            logits = best
        return ids[:, 0], np.exp(logits[:, 0] - log_sums) if summed and log_sums is not None else None

    def launch(self, batch: MicroBatch, wanted: Wanted) -> StepHandle:
        """Start a micro-batch. Up to `n_in_flight` steps may run, and `collect` returns their results in
        order."""
        k = wanted.top_k
        assert k <= self.max_top_k and len(self._in_flight) < self.n_in_flight <= self._n_places
        if self.encodes and not wanted.hidden and batch.stage < 0:
            raise UnsupportedModel(ONLY_EMBEDS)
        computed = wanted if k < 2 else wanted._replace(top_k=self.max_top_k)
        n_outputs = len(batch.outputs)
        handle = StepHandle(n_outputs, k, computed, self._n_launched % self._n_places)
        self.mesh.check_usable()
        step = self.recorded_step(batch, computed)
        self.kv.flush()
        if self.kv.states and not wanted.ahead:
            advance = self.kv.states.slots.advance
            batch = batch._replace(runs=[replace(run, states=advance(run)) for run in batch.runs])
        if self.group:
            tables = self._ropes.of_images(batch.images)
            if tables is None and self.group.joining.sends_tables:
                runs = batch.runs
                positions = np.concatenate([np.arange(r.first_pos, r.first_pos + r.n_rows) for r in runs])
                tables = self._ropes.at(positions)
            self.group.step(batch, computed, tables)
        if n_outputs:
            self.mesh.outputs.expect(n_outputs, computed, handle.place)
        self.compute(batch, step)
        self._n_launched += 1
        self._in_flight.append(handle)
        return handle

    def collect(self, handle: StepHandle) -> Rows:
        """Wait for the oldest step in flight and return its output rows, which the next call overwrites.
        Raises the errors of devices and nodes."""
        first = self._in_flight.popleft()
        assert first is handle
        n, k, computed, place = handle
        if n:
            self.mesh.outputs.collect(n, computed, place)
        if computed.hidden:
            return None, self.mesh.outputs.read_hidden(n, place), None
        if k:
            ids, logits, log_sums = self.mesh.outputs.read_top_k(n, computed, place)
            return ids[:, :k], logits[:, :k], log_sums
        if n:
            return None, self.mesh.outputs.read_logits(self._logits, n, computed, place), None
        return None, self._logits[:n], None

    def recorded_step(self, batch: MicroBatch, wanted: Wanted) -> Step:
        n_rows, n_outputs, runs = len(batch.tokens), len(batch.outputs), batch.runs
        most = self.max_hidden if wanted.hidden else self.max_outputs
        assert 0 < n_rows <= self.n_ubatch and n_outputs <= most and len(runs) <= MAX_RUNS
        rows = bucket(n_rows)
        halves = 0 < self._shape.halves <= rows and all(i >= rows // 2 for i in batch.outputs)
        halves = halves and not wanted.ahead
        n_alone = n_rows if n_rows == len(runs) else n_single(runs)
        mix = mix_of(rows // 2 if halves else rows, n_alone, len(runs))
        if self.encodes:
            mix = Mix.PREFILL
        kind = StepKind(rows, bucket(n_outputs), mix, wanted, batch.masks is not None, halves)
        if self.adapters and (width := width_of(runs)):
            kind = kind._replace(adapters=width)
        if batch.images and batch.images.rows:
            kind = kind._replace(images=True)
            if batch.images.sees_end:  # Halves would store K and V of later rows too late.
                kind = kind._replace(mix=Mix.PREFILL, halves=False, sees_end=True)
        return self.mesh.recorded_step(kind._replace(stage=batch.stage) if batch.stage >= 0 else kind)

    def record_decoding(self, sizes: Iterable[int]) -> None:
        """Record decoding steps with these numbers of rows, so that no request waits for a recording."""
        for n in sizes:
            if n <= min(self.n_ubatch, self.max_outputs):
                self.mesh.recorded_step(StepKind(n, n, mix_of(n), Wanted(self.max_top_k)))

    def record_ahead(self, is_awaited: Callable[[], bool]) -> bool:
        """Record one step that is likely next, unless `is_awaited` returns true before its end. Return
        whether more may be recorded. Encoders and groups of nodes record no steps ahead."""
        if self.group or self.encodes:
            return False
        steps = self.mesh.steps
        used = sorted(steps.by_kind.values(), key=lambda step: -step.used)
        kinds = [step.kind for step in used if step.used]
        for kind in likely_kinds(kinds, self._shape, self.n_slots, self.max_top_k):
            if kind not in self._tried and kind not in steps.by_kind and kind.n_outputs <= self.max_outputs:
                recorded = steps.record_ahead(kind, is_awaited)
                if recorded or not is_awaited():
                    self._tried.add(kind)
                return recorded or is_awaited()
        return False

    def compute(self, batch: MicroBatch, step: Step, tables: Mapping[str, np.ndarray] | None = None) -> None:
        """Compute this node's part of a micro-batch. `Run.states` must be set. `tables` contains rows of cos
        and sin that replace this node's rows."""
        tokens, runs, outputs, masks, stage, images = batch
        if stage > 0:  # the rows read the residuals of their positions
            tokens = [p for r in runs for p in range(r.first_pos, r.first_pos + r.n_rows)]
        n_rows, mix = len(tokens), step.kind.mix
        half = step.kind.n_rows // 2 if step.kind.halves else 0
        if masks is not None:
            self.mesh.outputs.write_masks(masks)
        second = self._second if half else None
        if second:
            front, back = cut_runs(runs, half)
            self._params.fill(tokens[:half], front, [], mix)
            second.fill(tokens[half:], back, [i - half for i in outputs], mix)
        elif images:
            self._params.fill(tokens, runs, outputs, mix, ends=step.kind.sees_end)
        else:
            self._params.fill(tokens, runs, outputs, mix, typed=self.encodes)
        positions = self._params.rows[: half or n_rows, 0]
        if second:
            positions = np.concatenate([positions, second.rows[: n_rows - half, 0]])
        if images:
            write_images(self.mesh, images.rows, self._params, second, n_rows)
            tables = tables or self._ropes.of_images(images)
        adapters = None
        if step.kind.adapters and self._adapter_rows:
            parts = [(runs, outputs)]
            if second:
                parts = [(front, []), (back, [i - half for i in outputs])]
            adapters = self._adapter_rows.at(step.kind, parts)
        self.mesh.write_step(self._params, tables or self._ropes.at(positions), second, adapters)
        self.mesh.run(step)
        if self.expert_cache:
            self.expert_cache.after_step(n_rows, step.kind.halves)

    @property
    def pools(self) -> list[Pool]:
        """Return a pool per layer group. The first group has no window."""
        width = -(-self.n_ctx // CELL_BLOCK)
        tables = self.kv.groups
        return [Pool(t.n_blocks, t.window) if t else Pool(width * self.n_slots) for t in tables]

    def set_block(self, group: int, slot: int, index: int, block: int) -> None:
        """Change a cell table before the next step."""
        if (table := self._tables[group]) is not None:
            table.set(slot, index, block)

    def expert_stats(self) -> dict[str, int]:
        """Return the hits, misses and replacements of the expert cache, if there is one."""
        return self.expert_cache.stats() if self.expert_cache else {}

    def save_due_s(self) -> float | None:
        """Return after how many seconds `save_counts` should be called, or None if there is nothing to
        store."""
        return self.expert_cache.due_s() if self.expert_cache else None

    def save_counts(self) -> None:
        """Store the experts' use counts for the next start, unless a step failed."""
        if self.expert_cache and not self.mesh.relay.broken:
            self.expert_cache.save()

    def block_parts(self) -> BlockParts:
        """Return the transfers of blocks between devices and host. Needs all devices in this process."""
        ropes = self.model.ropes(self.n_ctx)
        identity = identity_of(self.fingerprint, self.options, ropes, len(self.kv.plans))
        return BlockParts(self.mesh, self.kv, identity)

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        copy_blocks(self.mesh.devices, self.kv, copies)

    def copy_state(self, source: int, target: int, n_stored: int) -> None:
        copy_state(self.mesh.devices, self.kv, source, target, n_stored)

    def shift(self, slot: int, first: int, end: int, distance: int) -> None:
        """Move positions `first` to `end` - 1 of the slot down by `distance`, and rotate their keys. No step
        may be in flight."""
        assert self._shifts and not self._in_flight
        self.mesh.check_usable()
        self.kv.flush()
        cos_sin = self._shifts.cos_sin(distance)
        if self.group:
            self.group.shift(slot, first, end, distance, cos_sin)
        self._shifts.run(slot, first, end, distance, cos_sin)

    @property
    def shift_widths(self) -> dict[str, int] | None:
        """Return the number of values in a shift's cos and sin by table, or None if contexts are not
        shifted."""
        return self._shifts.widths if self._shifts else None

    def obey_shift(
        self, slot: int, first: int, end: int, distance: int, cos_sin: Mapping[str, np.ndarray]
    ) -> None:
        """Do this node's part of a shift, with node 0's cos and sin."""
        assert self._shifts
        self._shifts.run(slot, first, end, distance, cos_sin)

    def tell_of_compiling(self, tell: Callable[[], None]) -> None:
        """Make devices call `tell`, in any thread, after a step has waited for a pipeline."""
        for device in self.mesh.devices:
            device.compiled = tell

    @property
    def n_recorded(self) -> int:
        return self.mesh.steps.n_recorded

    @property
    def record_s(self) -> float:
        return self.mesh.steps.record_s

    @property
    def states(self) -> SlotStates | None:
        return self.kv.states.slots if self.kv.states else None

    def resumable(self, n_stored: int) -> int:
        return self.kv.resumable(n_stored)

    def resume_at(self, slot: int, position: int) -> int:
        """Return the last position, up to `position`, from which the slot can continue. Recurrent layers
        continue only from stored states."""
        return self.kv.states.slots.resume_at(slot, position) if self.kv.states else position

    def settle(self, slot: int, position: int) -> int:
        """Forget the states of rejected rows, and return like `resume_at`."""
        return self.kv.states.slots.settle(slot, position) if self.kv.states else position

    def device_names(self) -> list[str]:
        return [d.physical.name if d.physical else d.name for d in self.mesh.devices]

    def memory(self) -> list[dict[str, Any]]:
        return memory_report(self.mesh, self.layout, self._free_before, self.group)

    def reduce_stats(self) -> tuple[int, float]:
        """Return the number of all-reduces and their seconds, from the last write to the release of the
        reading devices."""
        return self.mesh.relay.n_reduces, self.mesh.relay.reduce_s

    def close(self) -> None:
        """`close` may be called twice."""
        if self.group:
            with suppress(VkbackendError):  # ignore transfers into memory that is freed next
                while self._in_flight and not self.group.lost:
                    self.mesh.check_usable()
                    self.collect(self._in_flight[0])
            self.group.close()
        self.save_counts()
        self.expert_cache = None
        self.mesh.close()
