from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vkbackend import env
from vkbackend.errors import UnsupportedModel
from vkbackend.meta.balance import Cost, Prediction, Shares, auto_split, predict
from vkbackend.meta.compiling import begin_all
from vkbackend.meta.expert_moves import ExpertSlots
from vkbackend.meta.expert_slots import attach_slots
from vkbackend.meta.host_memory import measure_gpus_host_memory
from vkbackend.meta.load import Progress
from vkbackend.meta.mesh import Mesh
from vkbackend.meta.ops.low_rank import attach
from vkbackend.meta.sizing import StepShape, StepSizes
from vkbackend.meta.slices import piece_nbytes
from vkbackend.meta.speed import measure_gpus
from vkbackend.models.adapters.info import AdapterInfo
from vkbackend.models.adapters.loaded import add_adapters
from vkbackend.models.architectures.base import Weights, all_weights
from vkbackend.models.architectures.memory_specs import KeyRotation
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.engine.cache.context_shift import ContextShift
from vkbackend.models.engine.runner.group import Joining, OpenDevices
from vkbackend.models.experts.expert_cache import ExpertCache
from vkbackend.models.fitting.fitter import Fitter
from vkbackend.models.fitting.flags import fit_note, of_encoder
from vkbackend.models.gguf.fingerprint import fingerprint
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options, with_a_share
from vkbackend.models.placement.control_vectors import marked, read_control_vectors
from vkbackend.models.placement.cost import cost_function
from vkbackend.models.placement.encoders import for_encoder, staged_cells
from vkbackend.models.placement.fit import Budget, budgets_of, check_fit, host_budgets, without
from vkbackend.models.placement.graph_layers import graph_layers
from vkbackend.models.placement.kv_cache import KVCache
from vkbackend.models.placement.layout import Layout
from vkbackend.models.placement.memory_report import Held, allocations
from vkbackend.models.placement.resident import Resident
from vkbackend.models.placement.settled import row_limit, settle
from vkbackend.models.placement.shifting import key_rotations
from vkbackend.models.placement.step_rows import reads_over_bus
from vkbackend.models.placement.tensors import FileSource, check_weights, notes, weights_in_file
from vkbackend.models.placement.traced_steps import (
    in_halves,
    token_recordings,
    unadapted,
)
from vkbackend.models.rope_options import state_rope
from vkbackend.runtime import Device


class Loading:
    """`options` holds the settings decided so far. If `joining` is set, several nodes load the model
    together. Otherwise this process loads the model alone, on `devices` if given. `residents` are models that
    are already loaded."""

    def __init__(
        self,
        gguf: GGUF,
        options: Options,
        joining: Joining | None,
        devices: Sequence[Device] | None,
        interleave: bool | None,
        residents: Sequence[Resident] = (),
    ) -> None:
        self._gguf, self._joining, self._devices = gguf, joining, devices
        self._residents = residents
        self._leads, self._interleave = joining is None or joining.leads, interleave
        state_rope(gguf, options)
        if options.attention:
            is_causal = options.attention == "causal"
            gguf.stated = {**gguf.stated, f"{gguf.architecture}.attention.causal": is_causal}
        self.model = model = load_model(gguf, options.with_heads, options.head)
        if options.control_vectors:
            sizes = model.n_layer - model.n_ahead, model.n_embd
            layers = options.control_vector_layer_range
            model.control = read_control_vectors(options.control_vectors, *sizes, layers)
        self.adapters = add_adapters(model, gguf, options.adapters) if options.lora else ()
        n_ctx = (0 if "n_ctx" in options.fit else options.n_ctx) or model.n_ctx_train
        self.options = options = with_a_share(replace(options, n_ctx=n_ctx))
        if model.encodes:
            self.options = options = for_encoder(options)
            model.n_staged = staged_cells(model, options) if joining is None else 0
        model.in_file = weights_in_file(gguf, model)
        self.fingerprint = marked(fingerprint(gguf), model.control)
        self._types = check_weights(gguf, model)
        self.notes = notes(gguf, model, n_ctx)
        self.n_ubatch = row_limit(model, options)
        self.prediction: Prediction | None = None
        self.layout: Layout
        self.shape: StepShape
        self._steps: StepSizes
        self.expert_cache: ExpertCache | None = None
        self._rotations: Mapping[int, KeyRotation | None] = {}

    def open(self, open_devices: OpenDevices, *, keep_values: bool) -> Mesh:
        options, joining = self.options, self._joining
        if joining is None:
            devices = open_devices(options.devices) if self._devices is None else self._devices
            return Mesh(devices, options, keep_values=keep_values)
        joining.open(options, self._interleave)
        devices = joining.join(options, open_devices, speeds=options.auto_split)
        return Mesh(devices, options, keep_values=keep_values, nodes=joining.nodes)

    def plan(self, mesh: Mesh) -> None:
        """Decide the layout and the memory of steps. Nodes compare their plans. Raises an error if the model
        does not fit."""
        if self._joining is None:
            measure_gpus(mesh.devices)
        fits = bool(self.options.fit)
        if fits and self._leads:
            self._fit(mesh)
        elif self._leads and self.options.auto_split and len(mesh.devices) > 1:
            self._balance(mesh)
        if self._joining:
            self.options = self._joining.settled(self.options)
        self._settle(mesh)
        if self._joining:
            self._joining.settle(self.options, fitted=fits)
            ropes, limits = self.model.ropes(self.options.n_ctx), [d.limits for d in mesh.devices]
            plan = self.layout.table()
            self._joining.compare(
                _identity(self.fingerprint, self.adapters), self.options, plan, limits, self._steps, ropes
            )

    def _fit(self, mesh: Mesh) -> None:
        asked, devices = self.options, mesh.devices
        if self.model.encodes:
            asked, self.options = of_encoder(asked), replace(asked, fit=())
            if asked.auto_split and len(devices) > 1:
                self._balance(mesh)
        else:
            halves = self._in_halves(mesh)
            room = [*self._budgets(mesh), *host_budgets(devices, self._residents)]
            how: dict[str, Any] = {"halves": halves, "reuse": mesh.reuse, "budgets": room}
            fitter = Fitter(self.model, self._types, devices, asked, **how)
            self.options = fitter.fit()
            self.n_ubatch = row_limit(self.model, self.options)
            if asked.auto_split and len(devices) > 1 and self.options.shares:
                cost, budgets = self.cost(mesh.devices), self._budgets(mesh)
                self.prediction = predict(devices, self.options.shares, cost, budgets)
        self.notes.append(fit_note(self.options, asked))

    def _balance(self, mesh: Mesh) -> None:
        cost = self.cost(mesh.devices)
        self.prediction = auto_split(mesh.devices, cost, self._budgets(mesh))
        for line in self.prediction.lines([d.physical.name if d.physical else d.name for d in mesh.devices]):
            env.log(1, line)
        self.options = replace(self.options, tensor_split=self.prediction.tensor_split)

    def _budgets(self, mesh: Mesh) -> list[Budget]:
        return without(budgets_of(mesh.devices), mesh.devices, self._residents)

    def _in_halves(self, mesh: Mesh) -> bool:
        halves = in_halves(mesh.devices, self.options)
        if self._interleave is not None and len(mesh.devices) > 1 and self.options.split_mode == "tensor":
            halves = self._interleave
        return halves and not self.model.encodes

    def _settle(self, mesh: Mesh) -> None:
        model, devices, alone = self.model, mesh.devices, self._joining is None
        settled = settle(
            *(model, self._types, devices, self.options),
            halves=self._in_halves(mesh),
            reuse=mesh.reuse,
            budgets=self._budgets(mesh),
            residents=self._residents,
            alone=alone,
        )
        self.options = options = settled.options
        self.n_ubatch, self.layout, self.shape = settled.n_ubatch, settled.layout, settled.shape
        self._steps = settled.steps
        limits = [device.limits for device in devices]
        if model.low_rank and (names := unadapted(model, self.layout, options, limits, self.shape)):
            raise UnsupportedModel(
                f"adapters change {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}, to which no "
                "adapter can be applied; train an adapter without these modules"
            )
        self.notes += settled.notes
        if self.prediction and options.shares:  # now the layers on the devices are known
            self.prediction = predict(devices, options.shares, self.cost(mesh.devices), self._budgets(mesh))
        if options.context_shift:
            self._rotations = key_rotations(model, self.layout, options, self._gguf.architecture)
        env.log(1, "plan\n" + self.layout.table())
        if self._leads:
            check_fit(devices, options, settled.sizes, model.n_layer, self._residents)

    def held(self, mesh: Mesh) -> list[Held]:
        """Return the bytes on each device according to the plan."""
        return allocations(self.layout, mesh.devices, self._steps, self.options)

    def cost(self, devices: Sequence[Device]) -> Callable[[Shares], Cost]:
        """Return the cost of a token on `devices` as a function of their shares."""
        limits = [device.limits for device in devices]
        return cost_function(self.model, self._types, self.options, limits, self.n_ubatch)

    def load(self, mesh: Mesh, progress: Progress | None, n_places: int) -> KVCache:
        """Up to `n_places` steps may be in flight."""
        model, layout, options = self.model, self.layout, self.options
        limits = [device.limits for device in mesh.devices]
        if any(device.compiles for device in mesh.devices):
            # The pipelines of a decode step compile while weights are read.
            begin_all(mesh.devices, token_recordings(model, layout, options, limits, self.shape))
        if reads_over_bus(layout):
            measure_gpus_host_memory(mesh.devices)
        source = FileSource(self._gguf, all_weights(model))
        mesh.stores.load(layout.loads, source, progress or (lambda done, total: None))
        attach(mesh.weights, model.n_adapters)
        ranges = [piece_nbytes(device) for device in mesh.devices]
        attach_slots(mesh.weights, layout.stacks, layout.tables, ranges, mesh.stores.slots)
        kv, weights = KVCache(mesh.stores, layout, options), Weights(mesh.weights)
        alone = {*model.tapped, *model.differing, *range(model.n_deepstack if options.mmproj else 0)}
        layers_of = partial(graph_layers, mesh.weights, kv.layers, self._steps.forms, alone)
        build = partial(model.forward, w=weights, caches=kv.layers)
        mesh.prepare(build, self.shape, self._steps, n_places, layers_of)
        if layout.tables:
            layers = layout.stacks, layout.tables
            staged = mesh.stores.stage_experts(*layers, source)
            slots = ExpertSlots(mesh.devices, mesh.inputs, mesh.weights, *layers, ranges, staged)
            if mesh.stores.stream:
                mesh.stores.stream.leave_out(
                    layout.stacks, dict(zip(slots.names, slots.resident, strict=True))
                )
            self.expert_cache = ExpertCache(slots, self.fingerprint)
            self.expert_cache.fill()
        for device in mesh.devices:
            device.drop_upload()
        model.low_rank = ()  # frees the host's copy
        return kv

    def shifting(self, mesh: Mesh, kv: KVCache) -> ContextShift | None:
        """Record the step of context shifts. Raises an error if a cache cannot shift."""
        if not self.options.context_shift:
            return None
        ropes = self.model.ropes(self.options.n_ctx)
        return ContextShift(mesh, kv, self._rotations, ropes, self.shape.n_rows)


def _identity(fingerprint: str, adapters: Sequence[AdapterInfo]) -> str:
    digests = "".join(adapter.digest for adapter in adapters)
    return hashlib.sha256((fingerprint + digests).encode()).hexdigest() if adapters else fingerprint


def n_stages(of: Sequence[int], split_mode: str, layout: Layout) -> int:
    """Return how many steps may be in flight, one per node in a pipeline. If node 0 computes the output,
    `launch` lasts until the step's end, so the number is 1. `of` maps each device to its node."""
    if split_mode not in ("layer", "hosts"):
        return 1
    vocab = layout.output_plan.ranges["vocab"]
    last = {of[d] for d, (begin, end) in enumerate(vocab) if begin < end}
    return 1 if 0 in last else len({of[d] for devices in layout.active.values() for d in devices} | last)
