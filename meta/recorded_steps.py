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
from vkbackend.meta.compiling import compile_all
from vkbackend.meta.known_speed import pace_of
from vkbackend.meta.reduce import Reduce
from vkbackend.meta.repeated_layers import RepeatedLayers
from vkbackend.meta.step_builder import Built, StepBuilder
from vkbackend.meta.step_kind import StepKind
from vkbackend.recording import Recording, cut_long, derive_barriers, in_parts
from vkbackend.runtime import Executable

# At least MIN_STEPS steps are stored, and more up to MAX_COMMANDS commands. A command takes 1 KB in Python,
# up to 2 KB in a driver, and 1 ms to record again.
MAX_COMMANDS, MIN_STEPS = 1 << 17, 32

Values = dict[str, list[View | None]]


@dataclass(slots=True)
class Step:
    kind: StepKind
    executables: list[Executable]
    reduces: list[Reduce | None]  # The reduce at the end of each segment except the last.
    values: Values  # By label, if keep_values is set.
    lag: int = 1  # Segment k may begin after all devices have finished segment k - `lag`.
    used: int = 0

    @property
    def n_commands(self) -> int:
        return sum(executable.recording.n_commands for executable in self.executables)


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
        self.by_kind: dict[StepKind, Step] = {}
        self.while_recording: Callable[[StepKind], AbstractContextManager[object]] = nullcontext
        self.n_recorded, self.record_s = 0, 0.0
        self._n_asked = 0

    def of(self, kind: StepKind) -> Step:
        step = self.by_kind.get(kind)
        if step is None:
            began = time.perf_counter()
            with self.while_recording(kind):
                step = self._record(kind)
            self.n_recorded += 1
            self.record_s += time.perf_counter() - began
            self._make_room(step.n_commands)
            self.by_kind[kind] = step
        self._n_asked += 1
        step.used = self._n_asked
        return step

    def _make_room(self, n_commands: int) -> None:
        """Close the least recently used steps until `n_commands` more commands fit. Runs end before the next
        call, so no recorded step is running."""
        n_commands += sum(step.n_commands for step in self.by_kind.values())
        for kind in sorted(self.by_kind, key=lambda kind: self.by_kind[kind].used):
            if n_commands <= MAX_COMMANDS or len(self.by_kind) < MIN_STEPS:
                break
            step = self.by_kind.pop(kind)
            n_commands -= step.n_commands
            self._close(step)

    def _close(self, step: Step) -> None:
        for device, executable in zip(self.builder.devices, step.executables, strict=True):
            if not device.abandoned:
                executable.close()

    def _record(self, kind: StepKind) -> Step:
        repeated = self._repeated(kind) if self._layers else None
        if repeated:
            recordings, reduces, values = repeated
        else:
            built = self.builder.recorded(kind)
            compile_all(self.builder.devices, built.recordings)
            recordings, values = self._placed(built)
            reduces = built.reduces
        executables: list[Executable] = []
        with collection_paused(), ExitStack() as undo:
            for device, recording in zip(self.builder.devices, recordings, strict=True):
                if env.debug() >= 3:
                    env.log(3, f"{device.name}: hazards: {[str(h) for h in hazards.check(recording)]}")
                executables.append(device.build(recording))
                undo.callback(executables[-1].close)
            undo.pop_all()
        return Step(kind, executables, reduces, values, lag=2 if kind.halves else 1)

    def _repeated(self, kind: StepKind) -> tuple[Sequence[Recording], list[Reduce | None], Values] | None:
        """Record a few of equal layers, or return None if the others would not repeat them."""
        assert self._layers
        if kind.stage >= 0:  # one layer
            return None
        for way in self._layers.ways(kind):
            built = self.builder.recorded(kind, [il for repetition in way for il in repetition.skipped])
            compile_all(self.builder.devices, built.recordings)
            with collection_paused():
                recordings, _ = self._placed(built, cut=False)
                if repeated := self._layers.repeat(recordings, built.reduces, way):
                    self._layers.settle(kind, way)
                    for device, recording in zip(self.builder.devices, repeated[0], strict=True):
                        recording.cut(pace_of(device))
                    return *repeated, {}
        self._layers.settle(kind, None)
        return None

    def _placed(self, built: Built, cut: bool = True) -> tuple[list[Recording], Values]:
        """Give the values of each device addresses, and add barriers. If `cut` is not set, submissions do not
        end within segments."""
        recordings, values = [], {name: list(views) for name, views in built.values.items()}
        for d, (device, recording) in enumerate(zip(self.builder.devices, built.recordings, strict=True)):
            offsets, nbytes = plan_scratch(recording, reuse=self._reuse)
            # fewer rows may need slightly more memory
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
