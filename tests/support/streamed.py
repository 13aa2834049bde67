"""Checks of weights that stay in the model file (meta/streams.py)."""

from __future__ import annotations

import time
from itertools import takewhile
from typing import Any

import numpy as np
import pytest

from vkbackend import hazards
from vkbackend.buffer import Buffer, Home
from vkbackend.meta.staged_experts import StagedExperts
from vkbackend.meta.streams import Fetch, Stream
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.recording import Dispatch, Exchange, Recording
from vkbackend.repeats import section_of

PLACES: dict[str, dict[str, Any]] = {
    "experts": {"override_tensor": (("_exps", "CPU"),)},
    "layers": {"n_gpu_layers": 2},
}


def stream_of(runner: Runner) -> Stream:
    stream = runner.mesh.stores.stream
    assert stream
    return stream


def check_windows(runner: Runner) -> int:
    """Check that a layer's streamed weights are read only after the copies of this layer have ended, and
    before the next layer. Returns the number of reads."""
    n_read = 0
    weights = runner.mesh.weights
    for step in runner.mesh.steps.by_kind.values():
        for d, executable in enumerate(step.executables):
            assert all(found.kind == "in-place" for found in hazards.check(executable.recording))
            ends = [c for c in executable.recording.commands if isinstance(c, Exchange)]
            assert len(ends) == len(step.meetings)
            n_read += check_recording(executable.recording, d, weights, list(step.meetings))
    return n_read


def check_recording(recording: Recording, d: int, weights: dict[str, Any], meetings: list[Any]) -> int:
    layer, ready, n_read = "", set[str](), 0
    later: list[tuple[str, ...]] = []  # the stacks that the layer's next fetches copy
    for command in recording.commands:
        if isinstance(command, Exchange):
            meeting = meetings.pop(0)
            if isinstance(meeting, Fetch) and not meeting.stacks:
                layer = section_of(command.label)
                fetches = (m for m in meetings if isinstance(m, Fetch))
                later = [fetch.stacks for fetch in takewhile(lambda fetch: fetch.stacks, fetches)]
                ready = {n for n, w in weights.items() if w.streamed and section_of(n) == layer}
                ready -= {f"{layer}.{name}" for stacks in later for name in stacks}
            elif isinstance(meeting, Fetch):
                assert section_of(command.label) == layer and meeting.stacks == later.pop(0)
                ready |= {f"{layer}.{name}" for name in meeting.stacks}
        elif isinstance(command, Dispatch):
            for view in command.args:
                if isinstance(view.buffer, Buffer) and view.buffer.home is Home.STREAM:
                    n_read += 1
                    held = [v for n in ready for _, v in weights[n].pieces[d] if v.buffer is view.buffer]
                    assert any(v.offset <= view.offset < v.end for v in held), (command.label, layer)
    return n_read


def poisoned(patch: pytest.MonkeyPatch) -> None:
    """Fill a region with NaN before a layer is copied to it, and fill the memory for staged experts before
    experts are copied. Delay each of these copies, which threads make, by a random time."""
    rng, start, copy = np.random.default_rng(1), Stream._start, Stream._copy_layer

    def slow(layer: Any, later: Any) -> int:
        time.sleep(rng.random() * 0.002)
        return copy(layer, later)

    def poisoned_start(stream: Stream, k: int) -> None:
        for _, buffer in stream._layers[k].buffers:
            buffer.host[:] = 0xFF
        start(stream, k)

    patch.setattr(Stream, "_start", poisoned_start)
    patch.setattr(Stream, "_copy_layer", staticmethod(slow))
    copy_experts = StagedExperts._copy

    def poisoned_copy(staged: StagedExperts, experts: Any) -> None:
        for buffer in filter(None, staged._buffers):
            buffer.host[:] = 0xFF
        time.sleep(rng.random() * 0.002)
        copy_experts(staged, experts)

    patch.setattr(StagedExperts, "_copy", poisoned_copy)
