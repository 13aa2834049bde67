"""Run one model on N devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from vkbackend import env, forks
from vkbackend.buffer import Home, aligned
from vkbackend.errors import DeviceLost
from vkbackend.meta.candidates import Outputs
from vkbackend.meta.nodes import Nodes, OverNodes
from vkbackend.meta.options import ReduceOptions
from vkbackend.meta.recorded_steps import RecordedSteps, Step
from vkbackend.meta.reduce import Provider
from vkbackend.meta.relay import Relay
from vkbackend.meta.repeated_layers import Layer, RepeatedLayers
from vkbackend.meta.sizing import StepShape, StepSizes, measure
from vkbackend.meta.step_builder import Build, StepBuilder
from vkbackend.meta.step_kind import StepKind
from vkbackend.meta.stores import Stores
from vkbackend.meta.tensor import Inputs
from vkbackend.meta.ways import make_provider
from vkbackend.profiling import report_values
from vkbackend.runtime import SIGNALS, Device
from vkbackend.step import StepParams


class Mesh:
    """Memory, recorded steps and replay of N devices. `devices` includes stand-ins for other nodes' devices.
    If `keep_values` is set, intermediate tensors can be read after a step."""

    def __init__(
        self,
        devices: Sequence[Device],
        options: ReduceOptions | None = None,
        *,
        keep_values: bool = False,
        nodes: Nodes | None = None,
    ) -> None:
        self.devices, self.options, self.nodes = list(devices), options or ReduceOptions(), nodes
        self.stores = Stores(self.devices)
        self.weights = self.stores.weights
        ahead, signal = self.options.relaying(self.devices)
        for device in self.devices:
            if not device.node:
                device.queue.signal = signal if signal in device.queue.signals else SIGNALS[0]
        self.relay = Relay(self.devices, ahead)
        self.outputs = Outputs()
        self.provider: Provider | None = None
        self._keep_values = keep_values or env.debug() >= 5
        self._inputs: list[Inputs] = []
        self._steps: RecordedSteps | None = None
        self._others: list[RecordedSteps] = []  # steps that do not compute the model
        self._forked = False
        forks.own(self)

    @property
    def reuse(self) -> bool:
        return not self._keep_values

    @property
    def inputs(self) -> list[Inputs]:
        return self._inputs

    @property
    def steps(self) -> RecordedSteps:
        assert self._steps, "the mesh is not prepared"
        return self._steps

    @property
    def pages_nbytes(self) -> tuple[int, int]:
        """The bytes of pinned host pages: (for shared tables, for slots)."""
        return self.stores.pages_nbytes(), self.provider.pages_nbytes if self.provider else 0

    def prepare(
        self,
        build: Build,
        shape: StepShape,
        sizes: StepSizes | None = None,
        n_places: int = 1,
        layers_of: Callable[[Sequence[Inputs]], Sequence[Layer]] = lambda inputs: (),
    ) -> None:
        """Allocate memory for steps up to `shape`. If `sizes` is None, a trial build measures them. Up to
        `n_places` steps may have output rows in transfer from other nodes. `layers_of(inputs)` returns the
        model's layers. A step records only a few of several equal layers. Raises UnsupportedFeature if the
        devices cannot follow the options."""
        sizes = sizes or measure(self.devices, build, shape, self.options.reduce_type, self.reuse)
        self.options.check(self.devices, sizes.slot)
        arenas = []
        for d, device in enumerate(self.devices):
            host = device.buffer(sizes.params, Home.STAGING, "step")
            local = device.buffer(sizes.params, Home.SCRATCH, "step")
            region = device.buffer(n, Home.STAGING, "logits") if (n := sizes.logits[d]) else None
            counts = device.buffer(n, Home.STAGING, "expert counts") if (n := sizes.counts) else None
            self._inputs.append(shape.inputs(d, host, local, region, counts))
            arenas.append(device.buffer(sizes.arenas[d], Home.SCRATCH, "scratch"))
        if stream := self.stores.stream:
            stream.attach([inputs.used for inputs in self._inputs])
            self.relay.stream = stream
        if sizes.slot:
            provider = make_provider(self.devices, sizes.slot, self.options.reduce_provider)
            self._order_copies(provider)
            self.provider = OverNodes(provider, self.devices, self.nodes) if self.nodes else provider
        reduce_type = self.options.reduce_type
        builder = StepBuilder(self.devices, self._inputs, self.provider, build, shape.active, reduce_type)
        layers = layers_of(self._inputs)
        repeated = RepeatedLayers(layers) if layers and self.reuse and env.repeating() else None
        self._steps = RecordedSteps(builder, arenas, self.reuse, repeated)
        vocabularies = shape.vocab, shape.draft_vocab or shape.vocab
        self.outputs = Outputs(self.devices, self._inputs, vocabularies, sizes.logits, self.nodes, n_places)

    def _order_copies(self, provider: Provider) -> None:
        """If copies follow segments and have no queue of their own, submit no segment ahead of a copy."""
        for device in self.devices if provider.copies else ():
            device.queue.ahead = device.queue.ahead and device.copies_apart

    def recorded_step(self, kind: StepKind, may_pad: bool = False) -> Step:
        return self.steps.of(kind, may_pad)

    def record(self, kind: StepKind, build: Build) -> Step:
        """Record a step of `build` instead of the model's forward function. The step uses the memory of the
        model's steps."""
        builder = replace(self.steps.builder, build=build)
        self._others.append(RecordedSteps(builder, self.steps.arenas, self.reuse))
        return self._others[-1].of(kind)

    def write_step(
        self,
        params: StepParams,
        rope: Mapping[str, np.ndarray],
        second: StepParams | None = None,
        adapters: np.ndarray | None = None,
    ) -> None:
        """Write the next step's parameters to every device. `second` holds the parameters for the second half
        of the rows. `rope` maps table names to float32 [rows, width / 2, 2]. `adapters` holds the words of
        StepKind.adapter_words."""
        for device, inputs in zip(self.devices, self._inputs, strict=True):
            if device.node:
                continue
            host = inputs.host.buffer.host  # type: ignore[union-attr]
            host[: params.used.nbytes] = params.used.view(np.uint8)
            if second:
                at = aligned(inputs.step.nbytes)
                host[at : at + second.used.nbytes] = second.used.view(np.uint8)
            for name, rows in rope.items():
                at = inputs.rope[name].offset
                host[at : at + rows.nbytes] = rows.reshape(-1).view(np.uint8)
            if adapters is not None:
                at = inputs.adapters.offset  # type: ignore[union-attr]
                host[at : at + adapters.nbytes] = adapters.view(np.uint8)
            device.flush(inputs.host.buffer)  # type: ignore[arg-type]

    def write_images(self, rows: Sequence[tuple[int, np.ndarray]], half: int) -> None:
        """Write rows of images before `write_step`. `rows` lists (first row, float32 [n, width * tables]).
        `half` is the number of rows of the first half, or 0 for a step without halves."""
        for device, inputs in zip(self.devices, self._inputs, strict=True):
            if device.node:
                continue
            host = inputs.host.buffer.host  # type: ignore[union-attr]
            for i, view in enumerate(inputs.images):
                table, width = (
                    host[view.offset : view.end].view(np.float32).reshape(view.shape),
                    view.shape[1],
                )
                table[0] = 0
                if half:
                    table[1 + half] = 0
                for first, values in rows:
                    n = min(max(0, half - first), len(values)) if half else len(values)
                    front, back = np.split(values[:, i * width : (i + 1) * width], [n])
                    table[1 + first : 1 + first + n] = front
                    table[2 + first + n : 2 + first + len(values)] = back

    def check_usable(self) -> None:
        """Raise DeviceLost if a step failed or was interrupted, or ForkedProcess in a forked child."""
        if self._forked:
            raise forks.refusal("this mesh of devices")
        if self.relay.broken:
            raise DeviceLost(
                f"the devices cannot be used again: {self.relay.broken}; close the model and load it again"
            )

    def disown(self) -> None:
        self._forked = True

    def run(self, step: Step) -> None:
        """Run a step. After DeviceLost or Timeout, `check_usable` always raises."""
        self.check_usable()
        self.relay.run(step, self.provider)
        if level := env.debug():
            self._show(step, level)

    def _show(self, step: Step, level: int) -> None:
        if level >= 2:
            for executable in step.executables:
                executable.report()
        if level >= 5 and self._keep_values:
            report_values(self.devices, step.values)

    def close(self) -> None:
        """Free all memory, except on a device that does not answer."""
        for device in self.devices:  # Wait until no command buffer is in use.
            device.abandoned |= not device.abandoned and not device.settle()
        for copying in (self.stores.stream, self.stores.staged):
            if copying:
                copying.close()
        self.relay.stream = self.stores.stream = self.stores.staged = None
        abandoned = any(device.abandoned for device in self.devices)
        for steps in (self._steps, *self._others):
            if steps:
                steps.close()
        if self.nodes:
            self.nodes.close()
            if isinstance(self.provider, OverNodes):
                self.provider.close_transfers()
        if self.provider:
            self.provider.release()
        for device in self.devices:
            device.close()
        if abandoned:
            _leaked.append((self.stores.pages, self.provider))
        self.weights.clear()
        self.stores.pages = []
        self.provider, self._inputs, self._steps, self.outputs = None, [], None, Outputs()
        self._others = []


# Pages that an abandoned device may still write remain mapped until the process ends.
_leaked: list[object] = []
