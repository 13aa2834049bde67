"""A recording that repeats ranges of commands with other views, such as the commands of a model's equal
layers. A range is stored once, with the views of its repeats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vkbackend.buffer import ALIGN, Buffer, View
from vkbackend.recording import (
    Command,
    Copy,
    Cut,
    Dispatch,
    Exchange,
    Pace,
    Recording,
    cut_positions,
    seconds_of,
)


@dataclass(eq=False, slots=True)
class Places:
    """The views of one array, such as a layer's weight, in each repeat. The stored commands use `base`, and
    repeat i uses `views[i]`. Only the runtime interprets `handles`."""

    base: View
    views: tuple[View, ...]
    handles: Any = field(default=None, repr=False)

    @property
    def is_fixed(self) -> bool:
        return all(v.buffer is self.base.buffer and v.offset == self.base.offset for v in self.views)

    @property
    def is_alike(self) -> bool:
        """Return whether all views have memory of the same kind, and offsets that differ by multiples of
        every alignment. Then push constants are equal."""
        base = self.base
        return all(
            isinstance(v.buffer, Buffer)
            and isinstance(base.buffer, Buffer)
            and v.buffer.home is base.buffer.home
            and (v.offset - base.offset) % ALIGN == 0
            for v in self.views
        )


@dataclass(frozen=True, slots=True)
class Repeat:
    """The stored commands `begin`..`end` are followed by `n` repeats of them. `moves` maps (index of the
    command, index of the view) to the places of each view that differs between repeats. The views of a
    dispatch are its args. The views of a copy are its source and target. `sections` maps the name of each
    layer in the range to the layer's names in the repeats."""

    begin: int
    end: int
    n: int
    moves: Mapping[tuple[int, int], Places]
    sections: Mapping[str, tuple[str, ...]]

    def command(self, command: Command, at: int, i: int) -> Command:
        """Return stored command number `at` with the views of repeat i."""

        def view(arg: int, old: View) -> View:
            places = self.moves.get((at, arg))
            return moved(old, places.base, places.views[i]) if places else old

        if isinstance(command, Dispatch):
            args = tuple(view(arg, old) for arg, old in enumerate(command.args))
            return replace(command, args=args, label=self._label(command.label, i))
        if isinstance(command, Copy):
            return Copy(view(0, command.src), view(1, command.dst), self._label(command.label, i))
        return Exchange(self._label(command.label, i)) if isinstance(command, Exchange) else command

    def _label(self, label: str, i: int) -> str:
        names = self.sections.get(section := section_of(label))
        return names[i] + label[len(section) :] if names else label


def section_of(label: str) -> str:
    """Return the name of the layer, the first two words of a label."""
    return ".".join(label.split(".", 2)[:2])


def name_in_layer(label: str) -> str:
    """Return a label without the name of its layer."""
    return label.split(".", 2)[-1]


def moved(view: View, base: View, to: View) -> View:
    """Return the view at the same offset in `to` as `view` has in `base`."""
    return View(to.buffer, to.offset + view.offset - base.offset, view.shape, view.dtype)


class RepeatingRecording(Recording):
    """`stored` has the commands without Cuts and repeats. `cuts` has the indices, among all commands, of the
    commands before which a submission ends."""

    __slots__ = ("_stored", "cuts", "repeats")

    def __init__(self, name: str, stored: Sequence[Command], repeats: Sequence[Repeat]) -> None:
        self.name, self._stored, self.repeats = name, list(stored), tuple(repeats)
        self.cuts: frozenset[int] = frozenset()

    @property
    def stored(self) -> list[Command]:
        return self._stored

    def cut(self, pace: Pace) -> None:
        """End submissions where `cut_long` ends them."""
        costs = [seconds_of(command, pace) for command in self.stored]
        self.cuts = frozenset(cut_positions((self.stored[at], costs[at]) for at, _, _ in self.order()))

    def order(self) -> Iterator[tuple[int, Repeat | None, int]]:
        """Yield the index in `stored` of every command, its Repeat and the number of the repeat. The Repeat
        of a stored command is None."""
        done = 0
        for repeat in self.repeats:
            yield from ((at, None, 0) for at in range(done, repeat.end))
            for i in range(repeat.n):
                yield from ((at, repeat, i) for at in range(repeat.begin, repeat.end))
            done = repeat.end
        yield from ((at, None, 0) for at in range(done, len(self.stored)))

    @property
    def commands(self) -> list[Command]:  # type: ignore[override]
        commands: list[Command] = []
        for position, (at, repeat, i) in enumerate(self.order()):
            if position in self.cuts:
                commands.append(Cut())
            command = self.stored[at]
            commands.append(repeat.command(command, at, i) if repeat else command)
        return commands

    @property
    def n_commands(self) -> int:
        return len(self.stored) + len(self.cuts) + sum((r.end - r.begin) * r.n for r in self.repeats)

    @property
    def has_cuts(self) -> bool:
        return bool(self.cuts)

    @property
    def n_segments(self) -> int:
        return 1 + sum(isinstance(self.stored[at], Exchange) for at, _, _ in self.order())
