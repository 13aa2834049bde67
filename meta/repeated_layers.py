"""Layers that are equal except for their weights and caches. A step records a few of them, and its recording
repeats the commands of one period of layers.

Most models repeat one layer. Others repeat a period of layers, such as five with a sliding window and one
without. The first layers and two periods pass through fusion, ordering, memory planning and barriers like a
complete model. If the commands of both periods then differ only in the views of weights and caches, further
periods repeat the first period's commands. Otherwise the complete model is recorded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vkbackend import env
from vkbackend.buffer import Buffer, View
from vkbackend.meta.reduce import Reduce
from vkbackend.meta.step_kind import StepKind
from vkbackend.meta.streams import Fetch
from vkbackend.recording import Command, Copy, Dispatch, Exchange, Recording
from vkbackend.repeats import Places, Repeat, RepeatingRecording, moved, section_of
from vkbackend.step import Mix

Meeting = Reduce | Fetch  # the host's work between two segments

MAX_PERIOD = 12
RECORDED = 2  # periods


class Way(NamedTuple):
    """The numbers of layers to record before the first period (`lead`) and after the last recorded period
    (`trail`). The period is multiplied by `factor`, because the addresses of values and the parity of reduces
    may repeat only after two periods."""

    lead: int
    trail: int
    factor: int


# In the order in which they are tried.
WAYS = Way(1, 0, 1), Way(2, 1, 1), Way(1, 0, 2), Way(2, 1, 2), Way(4, 2, 2)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of the graph, recorded in the scope `section`. Layers with equal keys record equal commands,
    except that each uses its own weights and caches. `views` lists these arrays by device, in an order that
    equal layers share."""

    section: str
    key: object
    views: Sequence[Sequence[View]]


class Repetition(NamedTuple):
    """`n` periods of `period` layers, beginning with layer `first`. The `lead` layers before them and the
    `trail` layers after them continue the same pattern."""

    lead: int
    first: int
    period: int
    n: int
    trail: int

    @property
    def n_more(self) -> int:
        return self.n - RECORDED

    @property
    def recorded(self) -> range:
        return range(self.first - self.lead, self.first + RECORDED * self.period + self.trail)

    @property
    def skipped(self) -> range:
        return range(self.recorded.stop, self.recorded.stop + self.n_more * self.period)


def repetitions(keys: Sequence[object], way: Way) -> list[Repetition]:
    """Find repetitions, from the first layer to the last. Each one skips as many layers as possible."""
    repetitions: list[Repetition] = []
    first = 0
    while first < len(keys):
        best = Repetition(way.lead, first + way.lead, 1, RECORDED, way.trail)
        for length in range(1, MAX_PERIOD + 1):
            period, end = length * way.factor, first + length * way.factor
            while end < len(keys) and keys[end] == keys[end - period]:
                end += 1
            n = max(RECORDED, (end - first - way.lead - way.trail) // period)
            candidate = Repetition(way.lead, first + way.lead, period, n, way.trail)
            if len(candidate.skipped) > len(best.skipped):
                best = candidate
        if best.n_more:
            repetitions.append(best)
            first = best.skipped.stop
        else:
            first += 1
    return repetitions


class RepeatedLayers:
    """The layers of a mesh's model, and the ways of recording that succeeded."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._index = {layer.section: il for il, layer in enumerate(layers)}
        self._arrays: dict[tuple[int, int], _Arrays] = {}
        self._places: dict[tuple[int, int, int, int, int], Places] = {}
        keys: list[object] = []
        for layer in layers:
            if layer.key not in keys:
                keys.append(layer.key)
        numbers = [keys.index(layer.key) for layer in layers]
        ways = (repetitions(numbers, way) for way in WAYS)
        self._ways: list[Sequence[Repetition]] = [way for way in ways if way]
        self._settled: dict[tuple[Mix, bool, bool], Sequence[Sequence[Repetition]]] = {}

    def ways(self, kind: StepKind) -> Sequence[Sequence[Repetition]]:
        """Return the ways to record a step, the best first. The first way is left out for a step in halves:
        the halves end at different times, so their last layers do not repeat."""
        settled = self._settled.get((kind.mix, kind.halves, kind.images))
        return self._ways[kind.halves :] if settled is None else settled

    def settle(self, kind: StepKind, way: Sequence[Repetition] | None) -> None:
        """For later steps of this kind, try only `way`, or no way if it is None."""
        self._settled[kind.mix, kind.halves, kind.images] = [way] if way else []

    def repeat(
        self, recordings: Sequence[Recording], meetings: Sequence[Meeting | None], way: Sequence[Repetition]
    ) -> tuple[list[RepeatingRecording], list[Meeting | None]] | None:
        """Return each device's recording and the meetings of all layers, or None if the recorded periods
        differ. `recordings` have barriers, and no Cuts."""
        try:
            repeating = [self._repeating(d, recording, way) for d, recording in enumerate(recordings)]
            return repeating, _repeated_meetings(repeating, meetings)
        except _Differs as difference:
            env.log(2, f"{recordings[0].name}: every layer is recorded: {difference}")
            return None

    def _repeating(self, d: int, recording: Recording, way: Sequence[Repetition]) -> RepeatingRecording:
        commands = list(recording.commands)
        layers = [self._index.get(section_of(_label(command))) for command in commands]
        repeats = []
        for repetition in way:
            begin, end = _window(layers, repetition)
            n, step = repetition.n_more, repetition.period
            moves = self._moves(d, recording.commands, layers, (begin, end), repetition)
            recorded = repetition.recorded
            names = {il: [self._layers[il + step * (i + 1)].section for i in range(n)] for il in recorded}
            sections = {self._layers[il].section: tuple(names[il]) for il in recorded}
            repeats.append(Repeat(begin, end, n, moves, sections))
            for at in range(end, len(commands)):  # The last recorded layers follow the repeats.
                if (il := layers[at]) in recorded:
                    places = enumerate(
                        self._places_of(d, il, view, repetition) for view in _views(commands[at])
                    )
                    last = {(at, arg): of for arg, of in places if of}
                    commands[at] = Repeat(begin, end, n, last, sections).command(commands[at], at, n - 1)
        return RepeatingRecording(recording.name, commands, repeats)

    def _moves(
        self,
        d: int,
        commands: Sequence[Command],
        layers: Sequence[int | None],
        window: tuple[int, int],
        repetition: Repetition,
    ) -> dict[tuple[int, int], Places]:
        """Compare the commands of the window with the same number of commands after it. For each view that
        moves from period to period, return its places in all periods."""
        begin, end = window
        moves: dict[tuple[int, int], Places] = {}
        for at in range(begin, end):
            this, following = commands[at], commands[at + end - begin]
            if _form(this) != _form(following):
                raise _Differs(f"{this} is followed by {following}")
            for arg, (view, after) in enumerate(zip(_views(this), _views(following), strict=True)):
                places = self._places_of(d, layers[at], view, repetition)
                expected = moved(view, places.base, places.views[0]) if places else view
                if expected != after:
                    raise _Differs(f"{_label(this)}: {view} is followed by {after}, not {expected}")
                if places and not places.is_fixed:
                    if not places.is_alike:
                        raise _Differs(f"{_label(this)}: {view} needs other push constants or memory")
                    moves[at, arg] = places
        return moves

    def _places_of(self, d: int, layer: int | None, view: View, repetition: Repetition) -> Places | None:
        """Return the places, in all periods, of the array that contains `view`. Return None if no array of
        the layer contains it. A fused command may also read an array of a neighbouring layer."""
        if layer is None or not isinstance(view.buffer, Buffer):
            return None
        recorded = repetition.recorded
        for il in (layer, layer + 1, layer - 1):
            if il in recorded and (index := self._arrays_of(d, il).index(view)) is not None:
                key = d, il, index, repetition.period, repetition.n_more
                if key not in self._places:
                    shifted = (il + repetition.period * (i + 1) for i in range(repetition.n_more))
                    arrays = [self._layers[j].views[d][index] for j in shifted]
                    self._places[key] = Places(self._layers[il].views[d][index], tuple(arrays))
                return self._places[key]
        return None

    def _arrays_of(self, d: int, layer: int) -> _Arrays:
        if (d, layer) not in self._arrays:
            self._arrays[d, layer] = _Arrays(self._layers[layer].views[d])
        return self._arrays[d, layer]


class _Differs(Exception):
    """Two periods of layers differ in more than their arrays."""


class _Arrays:
    """Finds the array of a layer in which a view begins."""

    def __init__(self, views: Sequence[View]) -> None:
        self._by_buffer: dict[object, list[tuple[int, int, int]]] = {}
        for index, view in enumerate(views):
            self._by_buffer.setdefault(view.buffer, []).append((view.offset, view.end, index))
        for arrays in self._by_buffer.values():
            arrays.sort()

    def index(self, view: View) -> int | None:
        arrays = self._by_buffer.get(view.buffer, [])
        at = bisect_right(arrays, (view.offset, 1 << 62, 0)) - 1
        return arrays[at][2] if at >= 0 and view.offset < arrays[at][1] else None


def _window(layers: Sequence[int | None], repetition: Repetition) -> tuple[int, int]:
    """Return the range of commands of the second-to-last recorded period, up to the first command of the
    last."""
    first, step = repetition.first, repetition.period
    bounds = []
    for begin in (first, first + step):
        period = range(begin, begin + step)
        bounds.append(next((at for at, il in enumerate(layers) if il in period), len(layers)))
    begin, end = bounds
    if not begin < end or 2 * end - begin > len(layers):
        raise _Differs(f"layers {first} and {first + step} have other numbers of commands")
    return begin, end


def _label(command: Command) -> str:
    return command.label if isinstance(command, Dispatch | Copy | Exchange) else ""


def _views(command: Command) -> tuple[View, ...]:
    if isinstance(command, Dispatch):
        return command.args
    return (command.src, command.dst) if isinstance(command, Copy) else ()


def _form(command: Command) -> object:
    """Return all fields of a command except its views and label."""
    if isinstance(command, Dispatch):
        c = command
        return c.op, c.variant, c.written, c.push, c.consts, c.groups, c.step, c.flops, len(c.args)
    return type(command) if isinstance(command, Copy | Exchange) else command


def _repeated_meetings(
    recordings: Sequence[RepeatingRecording], meetings: Sequence[Meeting | None]
) -> list[Meeting | None]:
    """Return the meetings at the ends of all segments except the last, including repeated segments."""
    spans = []
    for recording in recordings:
        ends = [at for at, command in enumerate(recording.stored) if isinstance(command, Exchange)]
        of_repeats = [(bisect_left(ends, r.begin), bisect_left(ends, r.end), r.n) for r in recording.repeats]
        spans.append(of_repeats)
        if of_repeats != spans[0]:
            raise _Differs("devices have other numbers of exchanges")
    repeated: list[Meeting | None] = []
    done = 0
    for begin, end, n in spans[0]:
        window = meetings[begin:end]
        if list(window) != list(meetings[end : 2 * end - begin]):
            raise _Differs("the reduces, or the copies from the file, differ")
        repeated += [*meetings[done:end], *(list(window) * n)]
        done = end
    return [*repeated, *meetings[done:]]
