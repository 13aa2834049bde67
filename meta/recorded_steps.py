"""The recorded steps of a mesh, recorded on first use and stored until other steps need the memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace

from vkbackend import env, hazards
from vkbackend.buffer import Buffer, Home, View
from vkbackend.collector import collection_paused
from vkbackend.memory import plan_scratch
from vkbackend.meta.compiling import begin_all, compile_all
from vkbackend.meta.known_speed import pace_of
from vkbackend.meta.reduce import Provider, Reduce
from vkbackend.meta.repeated_layers import RepeatedLayers
from vkbackend.meta.step_builder import Built, StepBuilder
from vkbackend.meta.step_kind import StepKind
from vkbackend.meta.streams import Fetch, copied_later
from vkbackend.ops import MAX_VEC_ROWS
from vkbackend.recording import Recording, cut_long, derive_barriers, in_parts
from vkbackend.runtime import Executable

# At least MIN_STEPS steps are stored. More are stored if their estimated host memory is at most MAX_NBYTES. A
# stored command takes 1.6 KB in Python, and every command, repeats included, takes 3.4 KB in lavapipe (RSS of
# 20 steps of 40 layers). GPU drivers are assumed to need 128 words for the commands and descriptors of a
# dispatch.
MAX_NBYTES, MIN_STEPS = 2 << 30, 32
STORED_NBYTES, CPU_NBYTES, DRIVER_NBYTES = 1600, 3400, 512
# lavapipe maps memory for the descriptor set of each dispatch, and crashes if the kernel refuses a map. A
# process may have 65,530 maps (vm.max_map_count). With 128 steps of 40 layers (104,000 commands), it had
# 64,000.
MAX_CPU_COMMANDS = 64_000
MAX_REPLACED = 8  # After this many replacements by a larger step, a kind is recorded.
COMPILING_SLICE_S = 0.002  # A step that is recorded ahead stops compiling within this time.

Values = dict[str, list[View | None]]


@dataclass(slots=True)
class Step:
    kind: StepKind
    executables: list[Executable]
    # the host's work at the end of each segment but the last
    meetings: list[Reduce | Fetch | None]
    values: Values  # By label, if keep_values is set.
    lag: int = 1  # Segment k may begin after all devices have finished segment k - `lag`.
    used: int = 0
    on_cpu: bool = False  # whether the driver of a device is a software driver
    # As `copied_later` returns.
    later: Sequence[frozenset[str]] = ()
    in_one_call: bool = False  # Whether one call of the driver may submit all segments.

    @property
    def reduces(self) -> list[Reduce | None]:
        return [meeting for meeting in self.meetings if not isinstance(meeting, Fetch)]

    @property
    def nbytes(self) -> int:
        """Estimate the host memory of the step."""
        recordings = [executable.recording for executable in self.executables]
        driver = CPU_NBYTES if self.on_cpu else DRIVER_NBYTES
        return sum(STORED_NBYTES * len(r.stored) + driver * r.n_commands for r in recordings)

    @property
    def n_cpu_commands(self) -> int:
        return sum(e.recording.n_commands for e in self.executables) if self.on_cpu else 0


def reads_the_host_alone(meetings: Sequence[Reduce | Fetch | None], provider: Provider | None) -> bool:
    """Return whether the submissions of a step may already run when the host exchanges its sums, because they
    wait for events, or because one call submits all of them. An H100 reads stale host memory that another
    device, or the host, has written during such a call. So devices may read only sums that the host wrote,
    and no weights that the host copies during the step. `tune` finds out whether a driver reads these sums
    correctly."""
    return all(
        meeting is None or (isinstance(meeting, Reduce) and provider and provider.of(meeting).host_writes)
        for meeting in meetings
    )


class _Awaited(Exception):
    """A request arrived while a step was being recorded ahead."""


class RecordedSteps:
    """Recorded steps by kind. `arenas` lists each device's memory for a step's values. `reuse` says whether
    values share memory. During a recording, the context `while_recording` makes other nodes record the same
    step."""

    def __init__(
        self,
        builder: StepBuilder,
        arenas: Sequence[Buffer],
        reuse: bool,
        layers: RepeatedLayers | None = None,
    ) -> None:
        self.builder, self.arenas, self._reuse, self._layers = builder, list(arenas), reuse, layers
        self.repeating = layers is not None  # whether equal layers are recorded once
        self.by_kind: dict[StepKind, Step] = {}
        self.while_recording: Callable[[StepKind], AbstractContextManager[object]] = nullcontext
        self.n_recorded, self.record_s = 0, 0.0
        self.n_replaced: dict[StepKind, int] = {}  # how often a larger step replaced a kind
        self._n_asked = 0
        self._is_awaited: Callable[[], bool] | None = None

    def record_ahead(self, kind: StepKind, is_awaited: Callable[[], bool]) -> bool:
        """Record a step that no request needs yet, and return whether it was recorded. `is_awaited` is called
        before every layer of the graph and of each device, and stops the recording if it returns True. Steps
        that were recorded ahead are the first to be closed, and take at most half of the room."""
        is_half_full = self.nbytes > MAX_NBYTES // 2 or self.n_cpu_commands > MAX_CPU_COMMANDS // 2
        if kind in self.by_kind or is_half_full:
            return False
        self._is_awaited = is_awaited
        try:
            self.by_kind[kind] = self._record(kind)
            self.n_replaced.pop(kind, None)
            return True
        except _Awaited:
            for device in self.builder.devices:
                device.stop_compiling()
            return False
        finally:
            self._is_awaited = None

    def _check(self) -> None:
        if self._is_awaited and self._is_awaited():
            raise _Awaited

    def _compile(self, recordings: Sequence[Recording]) -> None:
        """Compile the pipelines of a step. Ahead of need, they compile in the background."""
        devices = self.builder.devices
        if self._is_awaited is None:
            compile_all(devices, recordings)
            return
        begin_all(devices, recordings)
        pairs = list(zip(devices, recordings, strict=True))
        while not all(device.node or device.has_compiled(recording) for device, recording in pairs):
            self._check()
            time.sleep(COMPILING_SLICE_S)

    @property
    def nbytes(self) -> int:
        return sum(step.nbytes for step in self.by_kind.values())

    @property
    def n_cpu_commands(self) -> int:
        return sum(step.n_cpu_commands for step in self.by_kind.values())

    def of(self, kind: StepKind, may_pad: bool = False) -> Step:
        """Return the step of a kind, which is recorded if necessary. If `may_pad` is set, a larger recorded
        step may replace the step MAX_REPLACED times, because padding takes less time than a recording."""
        step = self.by_kind.get(kind)
        if step is None and may_pad and self.n_replaced.get(kind, 0) < MAX_REPLACED:
            step = self._larger(kind)
            if step:
                self.n_replaced[kind] = self.n_replaced.get(kind, 0) + 1
        if step is None:
            began = time.perf_counter()
            with self.while_recording(kind):
                step = self._record(kind)
            self.n_recorded += 1
            self.record_s += time.perf_counter() - began
            self._make_room(step)
            self.by_kind[kind] = step
            self.n_replaced.pop(kind, None)
        self._n_asked += 1
        step.used = self._n_asked
        return step

    def _larger(self, kind: StepKind) -> Step | None:
        """Return the smallest recorded step that can replace `kind`. It has at most twice the rows and at
        least as many output rows. If `kind` uses the kernels for few rows, so does the larger step."""
        n_rows, n_outputs = kind.n_rows, kind.n_outputs
        most = min(2 * n_rows, MAX_VEC_ROWS) if n_rows <= MAX_VEC_ROWS else 2 * n_rows
        larger = [
            (other.n_rows, other.n_outputs, other)
            for other in self.by_kind
            if not kind.halves  # an output row may be in the first half of a larger step
            and n_rows <= other.n_rows <= most
            and n_outputs <= other.n_outputs
            and other._replace(n_rows=n_rows, n_outputs=n_outputs) == kind
        ]
        return self.by_kind[min(larger)[2]] if larger else None

    def _make_room(self, new: Step) -> None:
        """Close the least recently used steps until `new` fits. Each run of a step ends before the next call,
        so no recorded step is running."""
        nbytes, n_commands = self.nbytes + new.nbytes, self.n_cpu_commands + new.n_cpu_commands
        for kind in sorted(self.by_kind, key=lambda kind: self.by_kind[kind].used):
            has_memory = nbytes <= MAX_NBYTES or len(self.by_kind) < MIN_STEPS
            if has_memory and n_commands <= MAX_CPU_COMMANDS:
                break
            step = self.by_kind.pop(kind)
            nbytes, n_commands = nbytes - step.nbytes, n_commands - step.n_cpu_commands
            self._close(step)

    def _close(self, step: Step) -> None:
        for device, executable in zip(self.builder.devices, step.executables, strict=True):
            if not device.abandoned:
                executable.close()

    def _record(self, kind: StepKind) -> Step:
        repeated = self._repeated(kind) if self.repeating else None
        if repeated:
            recordings, meetings, values = repeated
        else:
            built = self.builder.recorded(kind, check=self._check)
            self._compile(built.recordings)
            recordings, values = self._placed(built)
            meetings = built.meetings
        executables: list[Executable] = []
        by_host = reads_the_host_alone(meetings, self.builder.provider)
        with collection_paused(), ExitStack() as undo:
            for device, recording in zip(self.builder.devices, recordings, strict=True):
                if env.debug() >= 3:
                    env.log(3, f"{device.name}: hazards: {[str(h) for h in hazards.check(recording)]}")
                self._check()
                executables.append(device.build(recording, events=by_host))
                undo.callback(executables[-1].close)
            undo.pop_all()
        on_cpu = any(device.limits.is_cpu for device in self.builder.devices)
        lag, later = 2 if kind.halves else 1, copied_later(meetings)
        # Drivers may merge the submissions of a call, which would undo cuts.
        whole = by_host and not any(recording.has_cuts for recording in recordings)
        return Step(kind, executables, meetings, values, lag, on_cpu=on_cpu, later=later, in_one_call=whole)

    def _repeated(
        self, kind: StepKind
    ) -> tuple[Sequence[Recording], list[Reduce | Fetch | None], Values] | None:
        """Record only a few of several equal layers, or return None if the other layers would not repeat
        them."""
        assert self._layers
        if kind.stage >= 0 or kind.wanted.ahead:  # one layer
            return None
        for way in self._layers.ways(kind):
            skipped = [il for repetition in way for il in repetition.skipped]
            built = self.builder.recorded(kind, skipped, self._check)
            self._compile(built.recordings)
            with collection_paused():
                recordings, _ = self._placed(built, cut=False)
                if repeated := self._layers.repeat(recordings, built.meetings, way):
                    self._layers.settle(kind, way)
                    for device, recording in zip(self.builder.devices, repeated[0], strict=True):
                        recording.cut(pace_of(device))
                    return *repeated, {}
        self._layers.settle(kind, None)
        return None

    def _placed(self, built: Built, cut: bool = True) -> tuple[list[Recording], Values]:
        """Give each device's values addresses, and add barriers. If `cut` is set, a long segment is divided
        into several submissions."""
        recordings, values = [], {name: list(views) for name, views in built.values.items()}
        for d, (device, recording) in enumerate(zip(self.builder.devices, built.recordings, strict=True)):
            self._check()
            offsets, nbytes = plan_scratch(recording, reuse=self._reuse)
            # a step of fewer rows than the largest may need slightly more memory
            if nbytes > self.arenas[d].nbytes:
                self.arenas[d] = device.buffer(nbytes, Home.SCRATCH, "scratch")
            arena = self.arenas[d]
            places = {value: View(arena, at, (value.nbytes // 4,)) for value, at in offsets.items()}
            placed, pace = recording.place(places), pace_of(device)
            recordings.append(derive_barriers(cut_long(placed, pace) if cut else in_parts(placed, pace)))
            for views in values.values():
                if (view := views[d]) is not None:
                    at = places.get(view.buffer)  # type: ignore[arg-type]
                    views[d] = at and replace(view, buffer=arena, offset=at.offset + view.offset)
        return recordings, values

    def close(self) -> None:
        for step in self.by_kind.values():
            self._close(step)
        self.by_kind.clear()
