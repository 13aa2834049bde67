"""The mesh: N devices that replay one step together. Builds the recordings of a step once, relays between
segments.

The host path of a step is: StepParams into each device's staging, one submit per device, and per exchange one
wait and one signal. Nothing is allocated, compiled or recorded there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace

import numpy as np

from vkbackend import env, forks, hazards
from vkbackend.buffer import ALIGN, Buffer, Home, View, Virtual, aligned, nbytes_of
from vkbackend.collector import collection_paused
from vkbackend.errors import DeviceLost, PlanError, Timeout, VkbackendError
from vkbackend.memory import plan_scratch
from vkbackend.meta.candidates import Outputs
from vkbackend.meta.compiling import compile_all
from vkbackend.meta.hosts import Hosts, OverHosts
from vkbackend.meta.known_speed import pace_of
from vkbackend.meta.load import Load, Progress, Source, load_weights
from vkbackend.meta.options import ReduceOptions
from vkbackend.meta.reduce import Provider, Reduce, make_provider
from vkbackend.meta.sizing import Build, StepShape, StepSizes, build_step, measure
from vkbackend.meta.split import MIRRORED, State
from vkbackend.meta.step_kind import StepKind
from vkbackend.meta.tensor import Inputs, Weight
from vkbackend.pages import Pages
from vkbackend.profiling import report_values
from vkbackend.recording import Recording, cut_long, derive_barriers
from vkbackend.runtime import Device, Executable
from vkbackend.step import STEP_NBYTES, StepParams

WAIT_SLICE_S = 0.05  # the longest single wait: a signal (Ctrl-C) is noticed this soon
SPIN_S = 50e-6  # polling before waiting; a wake-up from a wait costs about as much
DRAIN_S = 5.0  # how long devices get to finish after a failure
# Recorded steps are kept while they have at most MAX_COMMANDS commands in all; MIN_STEPS are always kept. A
# command takes 1 KB here and up to 2 KB in a driver. Recording it anew takes 1 ms. A model of 24 layers on
# one device can keep all its 200 steps.
MAX_COMMANDS, MIN_STEPS = 1 << 17, 32


@dataclass(slots=True)
class Step:
    """A recorded step, ready to replay: one executable per device."""

    kind: StepKind
    executables: list[Executable]
    reduces: list[Reduce | None]  # behind each segment but the last; None: the devices only meet
    values: dict[str, list[View | None]]  # intermediate tensors by label, where the mesh keeps them
    lag: int = 1  # a segment may begin when all devices have finished the one this many before it
    used: int = 0  # when, counted in steps

    @property
    def n_commands(self) -> int:
        return sum(len(executable.recording.commands) for executable in self.executables)


class Mesh:
    """`devices` acting as one, those of other `hosts` included. `keep_values`: every intermediate tensor of a
    step can be read behind it."""

    def __init__(
        self,
        devices: Sequence[Device],
        options: ReduceOptions | None = None,
        *,
        keep_values: bool = False,
        hosts: Hosts | None = None,
    ) -> None:
        self.devices, self.options, self.hosts = list(devices), options or ReduceOptions(), hosts
        self.weights: dict[str, Weight] = {}
        self.stores: dict[str, Weight] = {}  # caches and constants: what changes
        self.n_reduces, self.reduce_s, self.load_s = 0, 0.0, 0.0
        self.n_recorded, self.record_s = 0, 0.0
        self._ahead, self._keep_values = self.options.submit_ahead, keep_values or env.debug() >= 5
        self._spin = SPIN_S if not any(d.limits.is_cpu for d in devices) else 0.0
        self._provider: Provider | None = None
        self._pages: list[Pages] = []
        self._inputs: list[Inputs] = []
        self.outputs = Outputs([], [], (), [])  # of steps, once these are prepared
        self._arenas: list[Buffer] = []
        self._steps: dict[StepKind, Step] = {}
        self._n_asked = 0
        self._bases = [0] * len(self.devices)
        # What other hosts do while a step is recorded here.
        self.beside: Callable[[StepKind], AbstractContextManager[object]] = nullcontext
        self._broken, self._forked = "", False
        forks.own(self)

    @property
    def reuse(self) -> bool:
        """Whether values of a step share memory."""
        return not self._keep_values

    @property
    def provider(self) -> Provider | None:
        """How partial sums meet; None where there are none."""
        return self._provider

    @property
    def pages_nbytes(self) -> tuple[int, int]:
        """Bytes of pinned host pages: (tables that all devices read, slots of reduces)."""
        slots = self._provider.pages_nbytes if self._provider else 0
        return sum(pages.nbytes for pages in self._pages if pages.home is Home.PAGES), slots

    def mapped_nbytes(self, d: int) -> int:
        """Bytes of the weights that the d-th device reads in the model's file."""
        views = [view for weight in self.weights.values() for _, view in weight.pieces[d]]
        return sum(v.nbytes for v in views if isinstance(v.buffer, Buffer) and v.buffer.home is Home.MAPPED)

    # ---- loading ----

    def load(self, loads: Sequence[Load], source: Source, progress: Progress | None = None) -> None:
        """Put the weights on the devices; `load_s` counts the seconds."""
        began = time.perf_counter()
        weights, pages = load_weights(self.devices, loads, source, progress)
        self.load_s += time.perf_counter() - began
        self.weights |= weights
        self._pages += pages

    def cache(
        self, name: str, n_cells: int, width: int, dtype: str, state: State, home: Home = Home.KV
    ) -> Weight:
        """A cache [n_cells, width] split by columns as `state` says, empty, in memory of its own.

        Raises PlanError where a device's share exceeds one binding: shaders read it as a whole.
        """
        weight = Weight(name, (n_cells, width), dtype, state, [])
        for d, device in enumerate(self.devices):
            pieces = []
            if n := state.count(d):
                nbytes = nbytes_of((n_cells, n), dtype)
                if nbytes > (limit := device.limits.max_storage_range):
                    raise PlanError(
                        f"{name} of {n_cells} cells takes {nbytes} bytes on {device.name}, "
                        f"which reads {limit} at once; use a smaller context, fewer slots or more devices"
                    )
                pieces = [(0, View(device.buffer(nbytes, home, name), 0, (n_cells, n), dtype))]
            weight.pieces.append(pieces)
        self.stores[name] = weight
        return weight

    def constant(self, name: str, values: np.ndarray) -> Weight:
        """A small u32 array that every device reads; `update` changes it between steps."""
        weight = Weight(name, values.shape, "u32", MIRRORED, [])
        for device in self.devices:
            buffer = device.buffer(max(values.nbytes, ALIGN), Home.KV, name)
            weight.pieces.append([(0, View(buffer, 0, values.shape, "u32"))])
        self.stores[name] = weight
        self.update(weight, values)
        return weight

    def update(self, weight: Weight, values: np.ndarray, row: int = 0, column: int = 0) -> None:
        """Write all of a `constant`, or `values` one behind another from (row, column) on."""
        at = 4 * (row * weight.shape[1] + column) if row or column or values.ndim < 2 else 0
        for d, device in enumerate(self.devices):
            whole = weight.whole(d)
            device.write(View(whole.buffer, whole.offset + at, values.shape, whole.dtype), values)

    def prepare(
        self, build: Build, shape: StepShape, sizes: StepSizes | None = None, n_places: int = 1
    ) -> None:
        """Allocate what steps up to `shape` need: `sizes`, or what a trial build of the largest step shows.
        `n_places`: of how many steps output rows may be on their way from other hosts at once."""
        sizes = sizes or measure(self.devices, build, shape, self.options.reduce_type, self.reuse)
        for d, device in enumerate(self.devices):
            host = device.buffer(sizes.params, Home.STAGING, "step")
            local = device.buffer(sizes.params, Home.SCRATCH, "step")
            region = device.buffer(n, Home.STAGING, "logits") if (n := sizes.logits[d]) else None
            self._inputs.append(shape.inputs(d, host, local, region))
            self._arenas.append(device.buffer(sizes.arenas[d], Home.SCRATCH, "scratch"))
        if sizes.slot:
            provider = make_provider(self.devices, sizes.slot, self.options.reduce_provider)
            self._provider = OverHosts(provider, self.devices, self.hosts) if self.hosts else provider
        self._shape, self._build = shape, build
        logits = [sizes.logits[d] for d in range(len(self.devices))]
        self.outputs = Outputs(self.devices, self._inputs, shape.vocab, logits, self.hosts, n_places)

    def _plan(self, recording: Recording) -> tuple[dict[Virtual, int], int]:
        return plan_scratch(recording, reuse=self.reuse)

    # ---- steps ----

    def recorded_step(self, kind: StepKind) -> Step:
        """The step is recorded on first use, and dropped when steps that were used later need its place."""
        step = self._steps.get(kind)
        if step is None:
            began = time.perf_counter()
            with self.beside(kind):
                step = self._record(kind)
            self.n_recorded += 1
            self.record_s += time.perf_counter() - began
            self._make_place(step.n_commands)
            self._steps[kind] = step
        self._n_asked += 1
        step.used = self._n_asked
        return step

    def _make_place(self, n_commands: int) -> None:
        """Close the steps that were not used for the longest time, to keep one more; none of them runs, as
        `run` waits for its end."""
        n_commands += sum(step.n_commands for step in self._steps.values())
        for kind in sorted(self._steps, key=lambda kind: self._steps[kind].used):
            if n_commands <= MAX_COMMANDS or len(self._steps) < MIN_STEPS:
                break
            step = self._steps.pop(kind)
            n_commands -= step.n_commands
            self._close(step)

    def _close(self, step: Step) -> None:
        for device, executable in zip(self.devices, step.executables, strict=True):
            if not device.abandoned:
                executable.close()

    def _record(self, kind: StepKind) -> Step:
        active, build = self._shape.active, self._build
        recordings, reduces, made = build_step(
            self.devices, self._inputs, self._provider, active, self.options.reduce_type, kind, build
        )
        compile_all(self.devices, recordings)
        executables, values = [], {name: list(views) for name, views in made.items()}
        with collection_paused(), ExitStack() as undo:
            for d, (device, recording) in enumerate(zip(self.devices, recordings, strict=True)):
                offsets, nbytes = self._plan(recording)
                if nbytes > self._arenas[d].nbytes:  # packing is not monotone: fewer rows may need a bit more
                    self._arenas[d] = device.buffer(nbytes, Home.SCRATCH, "scratch")
                arena = self._arenas[d]
                places = {value: View(arena, at, (value.nbytes // 4,)) for value, at in offsets.items()}
                placed = derive_barriers(cut_long(recording.place(places), pace_of(device)))
                if env.debug() >= 3:
                    env.log(3, f"{device.name}: hazards: {[str(h) for h in hazards.check(placed)]}")
                executables.append(device.build(placed))
                undo.callback(executables[-1].close)
                for views in values.values():
                    if (view := views[d]) is not None:  # a value that no command touches has no address
                        at = places.get(view.buffer)  # type: ignore[arg-type]
                        views[d] = at and replace(view, buffer=arena, offset=at.offset + view.offset)
            undo.pop_all()
        return Step(kind, executables, reduces, values, lag=2 if kind.halves else 1)

    def write_step(
        self, params: StepParams, rope: Mapping[str, np.ndarray], second: StepParams | None = None
    ) -> None:
        """Hand the next step's parameters (of halves: both) to every device; rope: float32 [rows, width / 2,
        2] by table name."""
        for device, inputs in zip(self.devices, self._inputs, strict=True):
            if device.host:
                continue
            host = inputs.host.buffer.host  # type: ignore[union-attr]
            host[:STEP_NBYTES] = params.words.view(np.uint8)
            if second:
                at = aligned(STEP_NBYTES)
                host[at : at + STEP_NBYTES] = second.words.view(np.uint8)
            for name, rows in rope.items():
                at = inputs.rope[name].offset
                host[at : at + rows.nbytes] = rows.reshape(-1).view(np.uint8)
            device.flush(inputs.host.buffer)  # type: ignore[arg-type]

    def check_usable(self) -> None:
        """Raise DeviceLost after a step that failed or was interrupted, ForkedProcess in a forked child."""
        if self._forked:
            raise forks.refusal("this mesh of devices")
        if self._broken:
            raise DeviceLost(
                f"the devices cannot be used again: {self._broken}; close the model and load it again"
            )

    def disown(self) -> None:
        self._forked = True

    def run(self, step: Step) -> None:
        """Replay a step on all devices and wait for its end. Raises DeviceLost or Timeout; the mesh is broken
        from then on. So it is after an interrupt (Ctrl-C), which may fall between two calls that belong
        together."""
        self.check_usable()
        self._broken = "a step of theirs was interrupted"  # until it has ended
        n = step.executables[0].n_segments
        try:
            self._relay(step, n)
        except VkbackendError as error:
            self._drain(error)
            raise
        self._broken = ""
        if level := env.debug():
            self._show(step, level)

    def _show(self, step: Step, level: int) -> None:
        if level >= 2:
            for executable in step.executables:
                executable.report()
        if level >= 5 and self._keep_values:
            report_values(self.devices, step.values)

    def _relay(self, step: Step, n: int) -> None:
        for d, device in enumerate(self.devices):
            queue = device.queue
            self._bases[d] = queue.submitted
            ahead = (n - 1 if self._ahead is None else self._ahead) if queue.ahead else 0
            queue.submit(step.executables[d], 0, min(n, step.lag + ahead))
            queue.allow(self._bases[d] + min(n, step.lag))
        for s in range(1, n):
            self._join(s)
            began, reduce = time.perf_counter(), step.reduces[s - 1]
            assert self._provider is not None
            if reduce:
                self._provider.exchange(reduce)
            for d, device in enumerate(self.devices):
                queue, base = device.queue, self._bases[d]
                queue.allow(base + min(n, s + step.lag))
                done = queue.submitted - base
                if done < n and (not queue.ahead or self._ahead is not None):
                    queue.submit(step.executables[d], done, 1)
            self.reduce_s += time.perf_counter() - began
            self.n_reduces += reduce is not None and not reduce.gather
        self._join(n)

    def _join(self, s: int) -> None:
        """Wait until every device finished its s-th segment of this step."""
        for d, device in enumerate(self.devices):
            queue, number = device.queue, self._bases[d] + s
            if queue.completed() >= number:
                continue
            began = time.monotonic()
            while self._spin and time.monotonic() - began < self._spin:
                if queue.completed() >= number:
                    break
            while not queue.wait(number, WAIT_SLICE_S):
                waited = time.monotonic() - began
                if waited > env.timeout_s():
                    raise Timeout(
                        f"{device.name} did not finish segment {s} of a step within {waited:.0f} s; "
                        "close the model and load it again (VKBACKEND_TIMEOUT sets the limit in seconds)"
                    )

    def _drain(self, error: VkbackendError) -> None:
        """After a failure let every device run what it was given; one that does not end is abandoned."""
        self._broken = str(error) or type(error).__name__
        deadline = time.monotonic() + DRAIN_S
        for device in self.devices:
            queue = device.queue
            try:
                queue.allow(queue.submitted)
                done = queue.wait(queue.submitted, max(0.0, deadline - time.monotonic()))
            except VkbackendError:
                done = True  # lost: nothing of it is pending any more
            if not done:
                device.abandoned = True
                env.log(1, f"{device.name} does not answer and is abandoned")

    def close(self) -> None:
        """Release recordings, memory and devices; a device that does not answer is left as it is."""
        for device in self.devices:  # nothing may run any more when its command buffers go
            device.abandoned |= not device.abandoned and not device.settle()
        abandoned = any(device.abandoned for device in self.devices)
        for step in self._steps.values():
            self._close(step)
        self._steps.clear()
        if self.hosts:
            self.hosts.close()
            if isinstance(self._provider, OverHosts):
                self._provider.close_transfers()
        for device in self.devices:
            device.close()
        if abandoned:
            _leaked.append((self._pages, self._provider))
        self._provider, self._pages, self._inputs, self._arenas, self.weights = None, [], [], [], {}
        self.outputs = Outputs([], [], (), [])


# Pages that an abandoned device may still write stay mapped for the life of the process.
_leaked: list[object] = []
