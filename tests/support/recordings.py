"""Random recordings for property tests, and small handwritten recordings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from vkbackend.buffer import Buffer, Home, View, Virtual
from vkbackend.recording import Barrier, Copy, Dispatch, Recording

WORDS = 64  # 32-bit words of every buffer in these tests


def buffer(home: Home = Home.SCRATCH, label: str = "b") -> Buffer:
    return Buffer(4 * WORDS, home, label)


def view(of: Buffer | Virtual, begin: int = 0, end: int = WORDS) -> View:
    """View words begin:end."""
    return View(of, 4 * begin, (end - begin,))


def dispatch(reads: Sequence[View], writes: Sequence[View], label: str = "", flops: int = 0) -> Dispatch:
    args = (*reads, *writes)
    written = tuple(range(len(reads), len(args)))
    return Dispatch("op", "f32", args, written, (), (), (1, 1, 1), None, label, flops)


@st.composite
def views(draw: st.DrawFn, of: Sequence[Any]) -> View:
    begin = draw(st.integers(0, WORDS - 1))
    return view(draw(st.sampled_from(of)), begin, draw(st.integers(begin + 1, WORDS)))


@st.composite
def recordings(draw: st.DrawFn, virtual: bool = False) -> Recording:
    """Draw 1 to 4 segments that use staging, host pages and scratch. Each segment begins with a read of host
    memory, as the segments of a step do. Commands never read what they write. If `virtual` is true, scratch
    buffers have no addresses yet."""
    host = [buffer(Home.STAGING, "staging"), buffer(Home.PAGES, "pages")]
    scratch = [
        Virtual(4 * WORDS * draw(st.integers(1, 9)), f"v{i}") if virtual else buffer(label=f"s{i}")
        for i in range(draw(st.integers(1, 12 if virtual else 3)))
    ]
    anywhere = [*host, *scratch]
    recording = Recording("random")
    for segment in range(draw(st.integers(1, 4))):
        if segment:
            recording.exchange(str(segment))
        recording.copy(view(host[0], 0, 8), view(draw(st.sampled_from(scratch)), 0, 8), "in")
        for _ in range(draw(st.integers(0, 8))):
            if draw(st.integers(0, 4)) == 0:
                src, dst = draw(views(anywhere)), draw(views(anywhere))
                words = min(src.shape[0], dst.shape[0])
                copy = Copy(replace(src, shape=(words,)), replace(dst, shape=(words,)))
                if not copy.reads[0].overlaps(copy.writes[0]):
                    recording.commands.append(copy)
                continue
            writes = draw(st.lists(views(anywhere), min_size=1, max_size=2))
            reads = draw(st.lists(views(anywhere), max_size=3))
            command = dispatch(reads, writes)
            if not any(r.overlaps(w) for r in command.reads for w in command.writes):
                recording.dispatch(command)
    return recording


def without_each_barrier(recording: Recording) -> Iterator[tuple[Barrier, Recording]]:
    """Yield each barrier together with the recording without this barrier."""
    for i, command in enumerate(recording.commands):
        if isinstance(command, Barrier):
            yield command, Recording(recording.name, recording.commands[:i] + recording.commands[i + 1 :])
