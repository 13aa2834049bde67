"""A loaded model on its devices: tokens, positions and slots in, logits out. Knows no text and no
sampling."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from vkbackend import env
from vkbackend.errors import VkbackendError
from vkbackend.meta.balance import Prediction, auto_split, predict
from vkbackend.meta.candidates import TopK
from vkbackend.meta.compiling import begin_all
from vkbackend.meta.mesh import Mesh, Step
from vkbackend.meta.sizing import StepShape
from vkbackend.meta.speed import measure_gpus
from vkbackend.meta.step_kind import StepKind, Wanted, bucket, mix_of
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.engine.blocks import Copy, Pool
from vkbackend.models.engine.group import Group
from vkbackend.models.engine.in_flight import Launched, Rows, n_stages
from vkbackend.models.engine.memory_report import memory_report
from vkbackend.models.engine.messages import Progress
from vkbackend.models.engine.micro_batch import MicroBatch
from vkbackend.models.engine.open_devices import open_devices
from vkbackend.models.engine.slot_copy import copy_blocks, copy_state
from vkbackend.models.gguf.fingerprint import fingerprint
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options, with_a_share
from vkbackend.models.placement.control_vectors import marked, read_control_vectors
from vkbackend.models.placement.cost import cost_function
from vkbackend.models.placement.fit import budgets_of, check_fit, sizes_with, with_fitting_layers
from vkbackend.models.placement.kv_cache import KVCache
from vkbackend.models.placement.layout import lay_out
from vkbackend.models.placement.recurrent_state import SlotStates
from vkbackend.models.placement.tensors import FileSource, check_weights, notes, weights_in_file
from vkbackend.models.placement.traced_steps import in_halves, step_shape, step_sizes, token_recordings
from vkbackend.models.rope_options import state_rope
from vkbackend.open_device import runtime_of
from vkbackend.ops import CELL_BLOCK
from vkbackend.runtime import Device
from vkbackend.step import MAX_ROWS, MAX_RUNS, Run, StepParams, cut_runs, n_single

ROPE_CACHE_NBYTES = 64 << 20  # cos/sin rows of all positions are kept up to this size


class Runner:
    """A model loaded as `options` say, from their file or from `gguf`, a file that is open already.

    `progress(done, total)` is called with bytes. `keep_values`: every intermediate tensor of a step can be
    read after it. `interleave`: whether large micro-batches are computed in two halves, one while the sums of
    the other are exchanged (None: if there are several physical devices). `group`: the hosts that run the
    model together, this one among them; device names are then HOST/DEVICE. `devices`: open devices in place
    of those that the options name. The attribute `options` has what was found while loading: context length,
    shares, layers on devices. `prediction`: the expected times, from measured devices.
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
    ) -> None:
        runtime = runtime_of(options.runtime)  # refuses an unknown name before anything is read
        self._interleave, self.group = interleave, group
        with GGUF.open(options.path) if gguf is None else nullcontext(gguf) as gguf:
            state_rope(gguf, options)
            self.model = model = load_model(gguf)
            if options.control_vectors:
                sizes = model.n_layer, model.n_embd
                layers = options.control_vector_layer_range
                model.control = read_control_vectors(options.control_vectors, *sizes, layers)
            model.in_file = weights_in_file(gguf, model)
            self.fingerprint = marked(fingerprint(gguf), model.control)
            types = check_weights(gguf, model)
            n_ctx = options.n_ctx or model.n_ctx_train
            self.notes = notes(gguf, model, n_ctx)
            self.options = options = with_a_share(replace(options, n_ctx=n_ctx))
            if group and group.leads:
                group.open(options, interleave)
            self.n_vocab, self.n_ctx, self.n_slots = model.n_vocab, n_ctx, options.n_slots
            self.n_ubatch = min(options.n_ubatch, bucket(n_ctx * self.n_slots), MAX_ROWS)
            exact = options.exact or env.exact()
            if group:
                devices = group.join(
                    options,
                    lambda own: open_devices(own, runtime, exact=exact) if own else [],
                    speeds=options.auto_split,
                )
            elif devices is None:
                devices = open_devices(options.devices, runtime, exact=exact)
            self.mesh = Mesh(devices, options, keep_values=keep_values, hosts=group.hosts if group else None)
            self.prediction: Prediction | None = None
            self._free_before = [device.free_nbytes() for device in self.mesh.devices]
            try:
                if group is None:
                    measure_gpus(self.mesh.devices)
                leads = group is None or group.leads
                if leads and options.auto_split and len(self.mesh.devices) > 1:
                    self.options = options = self._balanced(types, options)
                self._load(gguf, types, options, progress)
            except BaseException:
                self.mesh.close()
                raise

    def _balanced(self, types: dict[str, str], options: Options) -> Options:
        """The options with the shares that balance the devices' measured speeds under their memory."""
        devices = self.mesh.devices
        limits = [device.limits for device in devices]
        cost = cost_function(self.model, types, options, limits, self.n_ubatch)
        self.prediction = auto_split(devices, cost, budgets_of(devices))
        for line in self.prediction.lines(self.device_names()):
            env.log(1, line)
        return replace(options, tensor_split=self.prediction.tensor_split)

    def _load(self, gguf: GGUF, types: dict[str, str], options: Options, progress: Progress | None) -> None:
        model, mesh, n, group = self.model, self.mesh, len(self.mesh.devices), self.group
        leads = group is None or group.leads
        if group and not leads:
            self.options = options = group.settle(options)
        self.layout = layout = lay_out(model, types, n, options)
        limits = [device.limits for device in mesh.devices]
        halves = in_halves(mesh.devices, options)
        if self._interleave is not None and n > 1 and options.split_mode == "tensor":
            halves = self._interleave
        shape = self._shape = step_shape(model, layout, options, self.n_ubatch, halves)
        steps = step_sizes(model, layout, options, limits, shape, mesh.reuse)
        self.max_outputs, self.max_top_k = shape.n_outputs, shape.top_k
        sizes = sizes_with(model, types, mesh.devices, steps)
        if options.n_gpu_layers == "auto":
            self.options = options = with_fitting_layers(mesh.devices, options, sizes, model.n_layer)
            self.layout = layout = lay_out(model, types, n, options)
            held = options.n_gpu_layers if isinstance(options.n_gpu_layers, int) else model.n_layer + 1
            self.notes.append(f"{held} of {model.n_layer + 1} layers, the output counted, fit the devices")
            if self.prediction and options.shares:
                cost = cost_function(model, types, options, limits, self.n_ubatch)
                self.prediction = predict(mesh.devices, options.shares, cost, budgets_of(mesh.devices))
        env.log(1, "plan\n" + layout.table())
        if leads:
            check_fit(mesh.devices, options, sizes, model.n_layer)
        if group:
            if leads:
                group.settle(options)
            ropes = model.ropes(self.n_ctx)
            group.compare(self.fingerprint, options, layout.table(), limits, steps, ropes)
        # While weights are read, and beside the prompt's own programs.
        begin_all(mesh.devices, token_recordings(model, layout, options, limits, shape))
        mesh.load(layout.loads, FileSource(gguf, model.weights()), progress or (lambda done, total: None))
        self.kv = KVCache(mesh, layout, options)
        self._tables = self.kv.groups
        self._make_tables(shape)
        weights = Weights(mesh.weights)
        of = group.hosts.of if group and leads else [0] * n
        self._n_places = self.n_in_flight = n_stages(of, options.split_mode, layout)
        self._launched: deque[Launched] = deque()
        self._n_launched = 0
        mesh.prepare(
            lambda graph: model.forward(graph, weights, self.kv.layers), shape, steps, self._n_places
        )
        for device in mesh.devices:
            device.drop_upload()
        if group:
            group.loaded(mesh)

    def _make_tables(self, shape: StepShape) -> None:
        """What steps write: parameters, RoPE rows (all positions at once where that takes little), logits."""
        self._ropes = self.model.ropes(self.n_ctx)
        self._params, self._second = StepParams(), StepParams()
        self._rope_rows = {
            name: np.zeros((shape.n_rows, t.n_rot // 2, 2), np.float32) for name, t in self._ropes.items()
        }
        self._rope_all = {
            name: t.rows(np.arange(self.n_ctx)) if 4 * t.n_rot * self.n_ctx <= ROPE_CACHE_NBYTES else None
            for name, t in self._ropes.items()
        }
        self._logits = np.empty((self.max_outputs, self.n_vocab), np.float32)

    # ---- steps ----

    def step(self, tokens: Sequence[int], runs: Sequence[Run], outputs: Sequence[int]) -> np.ndarray:
        """Run one micro-batch; returns the logits of the output rows, float32 [len(outputs), n_vocab].

        Rows of a run are consecutive positions of one slot. The result is a view that the next step
        overwrites.
        """
        return self.collect(self.launch(MicroBatch(tokens, runs, outputs), Wanted()))[1]

    def step_top_k(
        self,
        tokens: Sequence[int],
        runs: Sequence[Run],
        outputs: Sequence[int],
        k: int,
        masks: np.ndarray | None = None,
        summed: bool = False,
    ) -> TopK:
        """As `step`; the best `k` (up to `max_top_k`) tokens of each output row, of those whose bits are set
        in `masks`, uint32 [len(outputs), ceil(n_vocab / 32)], the lowest bit of a word first."""
        assert 0 < k and outputs
        launched = self.launch(MicroBatch(tokens, runs, outputs, masks), Wanted(k, summed))
        ids, logits, log_sums = self.collect(launched)
        assert ids is not None
        return TopK(ids, logits, log_sums)

    def launch(self, batch: MicroBatch, wanted: Wanted) -> Launched:
        """Begin a micro-batch. Up to `n_in_flight` micro-batches may be on their way; `collect` takes them in
        order. Work that is asked for meanwhile runs after them."""
        k = wanted.top_k
        assert k <= self.max_top_k and len(self._launched) < self.n_in_flight <= self._n_places
        computed = wanted if k < 2 else Wanted(self.max_top_k, wanted.summed)
        n_outputs = len(batch.outputs)
        launched = Launched(n_outputs, k, computed, self._n_launched % self._n_places)
        self.mesh.check_usable()
        step = self.recorded_step(batch, computed)
        self.kv.flush()
        if self.kv.states:
            advance = self.kv.states.slots.advance
            batch = batch._replace(runs=[replace(run, states=advance(run)) for run in batch.runs])
        if self.group:
            tables = None
            if self.group.sends_tables:
                runs = batch.runs
                positions = np.concatenate([np.arange(r.first_pos, r.first_pos + r.n_rows) for r in runs])
                tables = self._angles(positions)
            self.group.step(batch, computed, tables)
        if n_outputs:
            self.mesh.outputs.expect(n_outputs, computed, launched.place)
        self.compute(batch, step)
        self._n_launched += 1
        self._launched.append(launched)
        return launched

    def collect(self, launched: Launched) -> Rows:
        """The results of the step that was launched first, a view that the next call overwrites. Raises
        the errors of devices and hosts."""
        first = self._launched.popleft()
        assert first is launched
        n, k, computed, place = launched
        if n:
            self.mesh.outputs.collect(n, computed, place)
        if k:
            ids, logits, log_sums = self.mesh.outputs.read_top_k(n, computed, place)
            return ids[:, :k], logits[:, :k], log_sums
        if n:
            self.mesh.outputs.read_logits(self._logits, n, place)
        return None, self._logits[:n], None

    def recorded_step(self, batch: MicroBatch, wanted: Wanted) -> Step:
        """The recorded step that computes the micro-batch."""
        n_rows, n_outputs, runs = len(batch.tokens), len(batch.outputs), batch.runs
        assert 0 < n_rows <= self.n_ubatch and n_outputs <= self.max_outputs and len(runs) <= MAX_RUNS
        rows = bucket(n_rows)
        halves = 0 < self._shape.halves <= rows and all(i >= rows // 2 for i in batch.outputs)
        n_alone = n_rows if n_rows == len(runs) else n_single(runs)
        mix = mix_of(rows // 2 if halves else rows, n_alone, len(runs))
        kind = StepKind(rows, bucket(n_outputs), mix, wanted, batch.masks is not None, halves)
        return self.mesh.recorded_step(kind)

    def compute(self, batch: MicroBatch, step: Step, tables: Mapping[str, np.ndarray] | None = None) -> None:
        """Run this host's part of a micro-batch, whose runs know the recurrent states they read and write.
        `tables`: rows of cos and sin by name, where this host's are not to be used."""
        tokens, runs, outputs, masks = batch
        n_rows, mix = len(tokens), step.kind.mix
        half = step.kind.n_rows // 2 if step.kind.halves else 0
        if masks is not None:
            self.mesh.outputs.write_masks(masks)
        second = self._second if half else None
        if second:
            front, back = cut_runs(runs, half)
            self._params.fill(tokens[:half], front, [], mix)
            second.fill(tokens[half:], back, [i - half for i in outputs], mix)
        else:
            self._params.fill(tokens, runs, outputs, mix)
        positions = self._params.rows[: half or n_rows, 0]
        if second:
            positions = np.concatenate([positions, second.rows[: n_rows - half, 0]])
        self.mesh.write_step(self._params, tables or self._angles(positions), second)
        self.mesh.run(step)

    def _angles(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """The rows of cos and sin, which the next call overwrites."""
        rope: dict[str, np.ndarray] = {}
        for name, table in self._rope_rows.items():
            every, rope[name] = self._rope_all[name], table[: len(positions)]
            rope[name][:] = every[positions] if every is not None else self._ropes[name].rows(positions)
        return rope

    @property
    def pools(self) -> list[Pool]:
        """Blocks of cells by group of layers, the first that of all positions."""
        width = -(-self.n_ctx // CELL_BLOCK)
        tables = self.kv.groups
        return [Pool(t.n_blocks, t.window) if t else Pool(width * self.n_slots) for t in tables]

    def set_block(self, group: int, slot: int, index: int, block: int) -> None:
        """Where positions of a slot lie from the next step on."""
        if (table := self._tables[group]) is not None:
            table.set(slot, index, block)

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy blocks of the caches. Raises what devices raise."""
        copy_blocks(self.mesh.devices, self.kv, copies)

    def copy_state(self, source: int, target: int, n_stored: int) -> None:
        """Copy the recurrent state of a slot behind its first `n_stored` positions."""
        copy_state(self.mesh.devices, self.kv, source, target, n_stored)

    def tell_of_compiling(self, tell: Callable[[], None]) -> None:
        """Call `tell` behind every program that a step waited for, in any thread."""
        for device in self.mesh.devices:
            device.compiled = tell

    @property
    def n_recorded(self) -> int:
        """How many steps were recorded so far; one that is recorded first takes longer."""
        return self.mesh.n_recorded

    @property
    def record_s(self) -> float:
        """Seconds that recording and compiling steps took so far."""
        return self.mesh.record_s

    @property
    def states(self) -> SlotStates | None:
        """Which cells hold the recurrent state of the slots, where there is such."""
        return self.kv.states.slots if self.kv.states else None

    def resumable(self, n_stored: int) -> int:
        """The first position at which a sequence can go on after `n_stored` positions of it were written."""
        return self.kv.resumable(n_stored)

    def resume_at(self, slot: int, position: int) -> int:
        """The last position, at most `position`, from which the slot can go on. With recurrent layers these
        are only the positions whose state was kept."""
        return self.kv.states.slots.resume_at(slot, position) if self.kv.states else position

    # ---- reports ----

    def device_names(self) -> list[str]:
        return [d.physical.name if d.physical else d.name for d in self.mesh.devices]

    def memory(self) -> list[dict[str, Any]]:
        """Bytes per device by purpose (memory_report.py)."""
        return memory_report(self.mesh, self._free_before, self.group)

    def reduce_stats(self) -> tuple[int, float]:
        """(all-reduces so far, seconds the host spent between the last writer's end and the release of the
        readers)."""
        return self.mesh.n_reduces, self.mesh.reduce_s

    def close(self) -> None:
        """Release everything; may be called twice."""
        if self.group:
            with suppress(VkbackendError):  # what is on its way to memory that goes now
                while self._launched and not self.group.lost:
                    self.mesh.check_usable()
                    self.collect(self._launched[0])
            self.group.close()
        self.mesh.close()
