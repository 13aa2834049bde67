"""Runs the steps of a model.

The file is long because a step passes through one class, which saves calls between objects per token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from vkbackend import env
from vkbackend.errors import UnsupportedModel, VkbackendError
from vkbackend.meta.load import Progress
from vkbackend.meta.recorded_steps import Step
from vkbackend.meta.step_kind import StepKind, Wanted, bucket, mix_of
from vkbackend.models.arguments import ONLY_EMBEDS
from vkbackend.models.engine.cache.block_parts import BlockParts, identity_of
from vkbackend.models.engine.cache.blocks import Copy, Pool
from vkbackend.models.engine.cache.slot_copy import copy_blocks, copy_state
from vkbackend.models.engine.runner.adapter_rows import width_of
from vkbackend.models.engine.runner.group import Group
from vkbackend.models.engine.runner.likely_steps import likely_kinds
from vkbackend.models.engine.runner.loading import Loading, n_stages
from vkbackend.models.engine.runner.memory_report import memory_report
from vkbackend.models.engine.runner.micro_batch import MicroBatch, Rows, StepHandle
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.engine.runner.rope_rows import RopeRows
from vkbackend.models.engine.runner.step_input import StepInput, Tables
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options
from vkbackend.models.placement.recurrent_state import SlotStates
from vkbackend.models.placement.resident import Resident
from vkbackend.open_device import runtime_of
from vkbackend.ops import CELL_BLOCK
from vkbackend.runtime import Device
from vkbackend.step import MAX_RUNS, Mix, Run, n_single


class Runner:
    """If `keep_values` is set, every intermediate tensor can be read after a step. `interleave` splits large
    micro-batches in two, so that one part computes while the other part's sums are exchanged. An `interleave`
    of None means True for several physical devices. `group` holds the nodes of the model, with devices named
    NODE/DEVICE. `devices` are already open. `residents` are models that are already loaded.

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
        self._tried: set[StepKind] = set()  # kinds of steps that are recorded or failed to record
        self.max_outputs, self.max_top_k = shape.n_outputs, shape.top_k
        self.max_hidden, self.n_embd, self.encodes = shape.n_hidden, self.model.n_embd, shape.encodes
        self.image_width = shape.n_image_tables * self.n_embd
        self._tables = self.kv.groups
        self.expert_cache = loading.expert_cache
        ropes = self.model.ropes(self.n_ctx)
        self.has_sections = any(table.is_multimodal for table in ropes.values())
        is_even = len(set(self.layout.active.values())) == 1  # all devices compute all layers
        self.n_stages = self.model.n_layer + 1 if self.model.n_staged and is_even else 0
        self.adapters = loading.adapters
        self.default_adapters = tuple((info.id, info.scale) for info in self.adapters if info.scale)
        self._input = StepInput(
            self.mesh,
            shape,
            RopeRows(ropes, self.n_ctx, shape.n_rows),
            has_adapters=bool(self.adapters),
            encodes=self.encodes,
        )
        self._logits = np.empty((self.max_outputs, self.n_vocab), np.float32)
        self._shifts = loading.shifting(self.mesh, self.kv)
        self._in_flight: deque[StepHandle] = deque()
        self._n_launched = 0
        self._pads = False

    def step(self, tokens: Sequence[int], runs: Sequence[Run], outputs: Sequence[int]) -> np.ndarray:
        """Run one micro-batch and return the logits of its output rows, float32 [len(outputs), n_vocab],
        which the next step overwrites. Rows of a run are consecutive positions of one slot."""
        return self.collect(self.launch(MicroBatch(tokens, runs, outputs), Wanted()))[1]

    @property
    def is_idle(self) -> bool:
        """Return whether no step is in flight. Only then can the head draft."""
        return not self._in_flight

    def launch(self, batch: MicroBatch, wanted: Wanted) -> StepHandle:
        """Start a micro-batch. Up to `n_in_flight` steps may run, and `collect` returns their results in
        order."""
        k = wanted.top_k
        assert k <= self.max_top_k and len(self._in_flight) < self.n_in_flight <= self._n_places
        if self.encodes and not wanted.hidden and batch.stage < 0:
            raise UnsupportedModel(ONLY_EMBEDS)
        computed = wanted if k < 2 else wanted._replace(top_k=self.max_top_k)
        n_outputs = len(batch.outputs)
        self.mesh.check_usable()
        step = self.recorded_step(batch, computed)
        place = self._n_launched % self._n_places
        handle = StepHandle(n_outputs, k, computed, step.kind.n_outputs, place)
        self.kv.flush()
        if self.kv.states and not wanted.ahead:
            advance = self.kv.states.slots.advance
            batch = batch._replace(runs=[replace(run, states=advance(run)) for run in batch.runs])
        if self.group:
            tables = self._input.tables_for_nodes(batch, self.group.joining.sends_tables)
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
        n, k, computed, n_recorded, place = handle
        if n:
            self.mesh.outputs.collect(n, computed, place)
        if computed.hidden:
            return None, self.mesh.outputs.read_hidden(n, place), None
        if k:
            ids, logits, log_sums = self.mesh.outputs.read_top_k(n, computed, n_recorded, place)
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
        if batch.stage >= 0:
            kind = kind._replace(stage=batch.stage)
        # A step with one run is never replaced by a larger step, so its rows always have the same bits.
        return self.mesh.recorded_step(kind, self._pads and len(runs) > 1)

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
        likely = likely_kinds(kinds, self._shape, self.n_slots, self.max_top_k)
        for kind in chain(list(steps.n_replaced), likely):
            if kind not in self._tried and kind not in steps.by_kind and kind.n_outputs <= self.max_outputs:
                recorded = steps.record_ahead(kind, is_awaited)
                if recorded or not is_awaited():
                    self._tried.add(kind)
                return recorded or is_awaited()
        return False

    def allow_padding(self) -> None:
        """Let a recorded step with more rows replace a step of several sequences that is not recorded yet.
        Groups of nodes do not pad, because all nodes need the same steps. With speculation, steps are not
        padded, because drafts are chosen by the measured times of exact steps."""
        self._pads = not (self.group or self.options.speculation)

    def compute(self, batch: MicroBatch, step: Step, tables: Tables | None = None) -> None:
        """Compute this node's part of a micro-batch. `Run.states` must be set. `tables` contains rows of cos
        and sin that replace this node's rows."""
        self._input.write(batch, step.kind, tables)
        self.mesh.run(step)
        if self.expert_cache:
            self.expert_cache.after_step(len(batch.tokens), step.kind.halves)

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
        """Return the object that copies blocks between devices and host. Needs all devices in this
        process."""
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
        """Forget the states of rejected rows, and return the result of `resume_at`."""
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
            with suppress(VkbackendError):  # failed transfers do not matter, because the memory is freed next
                while self._in_flight and not self.group.lost:
                    self.mesh.check_usable()
                    self.collect(self._in_flight[0])
            self.group.close()
        self.save_counts()
        self.expert_cache = None
        self.mesh.close()
