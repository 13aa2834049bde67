"""Weights that stay in the mapped model file, because the system has too little memory to pin them.

Each device has two regions of pinned memory, and reads the weights of the l-th of these layers from region l
mod 2. A step's segments end before each of the layers. While the devices compute layer l, a thread copies the
next layer from the file to the other region. The addresses in a region never change, so recordings need not
change. Every byte crosses the bus as often as if all weights were pinned.

In a step with few rows, a layer uses few of its experts. Then the segment also ends after the router. The
router writes the ids of the used experts to host memory, and the host copies only these experts. Experts that
have slots in device memory (expert_slots.py) are not copied, because steps read them from the slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from vkbackend import env
from vkbackend.buffer import Buffer, View
from vkbackend.errors import Timeout, UnsupportedFeature
from vkbackend.host_copy import copy_into
from vkbackend.meta.slices import Load
from vkbackend.meta.streamed_weights import (
    N_REGIONS,
    Pair,
    Source,
    by_layer,
    bytes_of,
    expert_pairs,
    matrix_pairs,
)
from vkbackend.meta.tensor import Weight
from vkbackend.repeats import name_in_layer
from vkbackend.runtime import Device


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ends a segment before the next layer, or if `stacks` is set, after the router of a layer. `stacks` are
    the names of the experts' matrices within the layer. Each node that computes the layer has one device in
    `devices`, which wrote the ids."""

    stacks: tuple[str, ...] = ()
    n_ids: int = 0
    devices: tuple[int, ...] = ()


def uses_all(n_rows: int, n_used: int, n_experts: int) -> bool:
    """Return whether a step copies all experts of a layer ahead, before the layer begins. With an even
    router, a step with at least as many pairs (row, expert) as experts uses 63 % of the experts or more, and
    copying ahead takes no additional time."""
    return n_rows * n_used >= n_experts


@dataclass(slots=True)
class _Layer:
    """The copies to the buffers of all devices: the pairs of `matrices`, and each expert's pairs by name of
    the stack. Steps read the experts in `resident` of the stacks in `cached` from slots. An empty slot is -1
    in `resident`."""

    buffers: list[tuple[Device, Buffer]]
    matrices: list[Pair] = field(default_factory=list)
    stacks: dict[str, list[list[Pair]]] = field(default_factory=dict)
    cached: frozenset[str] = frozenset()
    resident: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def pairs(self, name: str, experts: Iterable[int]) -> Iterator[Sequence[Pair]]:
        """Yield the pairs of each expert that steps do not read from a slot."""
        in_slots = set(self.resident.tolist()) if name in self.cached else ()
        return (self.stacks[name][e] for e in experts if e not in in_slots)


class Stream:
    """Copies the weights of a step from the file to this node's devices. `n_copied` counts bytes."""

    def __init__(
        self,
        devices: Sequence[Device],
        loads: Sequence[Load],
        weights: Mapping[str, Weight],
        source: Source,
    ) -> None:
        """The arrays of `source` keep the file mapped. Raises UnsupportedFeature if the host cannot write the
        memory of a device while a step runs."""
        self._devices = devices
        self._layers: list[_Layer] = []
        self._names: list[str] = []
        self._used: list[View | None] = []
        self._thread = ThreadPoolExecutor(1, "vkbackend-stream")
        self._copying: dict[int, Future[int]] = {}
        self._later: Sequence[frozenset[str]] = ()
        self._at = -1
        self.n_copied = 0
        here = [d for d, device in enumerate(devices) if not device.node]
        for section, of_layer in by_layer(loads).items():
            pieces = [
                (d, view) for load in of_layer for d in here for _, view in weights[load.name].pieces[d]
            ]
            buffers = [(devices[d], view.buffer) for d, view in pieces]
            layer = _Layer(list(dict.fromkeys(buffers)))  # type: ignore[arg-type]
            for device, buffer in layer.buffers:
                if buffer.host is None:
                    raise UnsupportedFeature(
                        f"{device.name} cannot read weights that the host writes during a step; pin all "
                        "weights (pinned_mib)"
                    )
            for load in of_layer:
                raw, weight = source.data(load.name), weights[load.name]
                for d in here:
                    if len(load.shape) < 3:
                        layer.matrices += matrix_pairs(load, d, weight.pieces[d], raw)
                        continue
                    of_device = expert_pairs(load, d, weight, raw, devices[d])
                    stack = layer.stacks.setdefault(name_in_layer(load.name), [[] for _ in of_device])
                    for e, pairs in enumerate(of_device):
                        stack[e] += pairs
            self._layers.append(layer)
            self._names.append(section)

    def attach(self, used: Sequence[View | None]) -> None:
        """Set the host-visible memory to which each device writes the ids of used experts."""
        self._used = list(used)

    def leave_out(self, stacks: Mapping[str, Sequence[Load]], resident: Mapping[str, np.ndarray]) -> None:
        """Do not copy experts that are in slots. `resident` has the experts of each layer's slots ("blk.3.").
        The slots change only between steps."""
        for section, layer in zip(self._names, self._layers, strict=True):
            if (prefix := f"{section}.") in resident:
                layer.cached = frozenset(name_in_layer(load.name) for load in stacks[prefix])
                layer.resident = resident[prefix]

    def begin(self, later: Sequence[frozenset[str]]) -> None:
        """Begin a step. For each layer, `later` has the stacks whose experts are copied after the router. No
        step may be running."""
        self._later, self._at = later, -1
        assert len(later) in (0, len(self._layers)), f"a step reads {len(later)} layers from the file"
        if later:
            for k in range(min(N_REGIONS, len(self._layers))):
                self._start(k)

    def meet(self, fetch: Fetch) -> None:
        """Do the host's work between two segments. All devices have finished the segment before, and wait.
        Raises Timeout."""
        if fetch.stacks:
            self._copy_experts(fetch)
            return
        self._at += 1
        following = self._at + N_REGIONS - 1
        if self._at and following < len(self._layers):
            self._start(following)
        if copying := self._copying.pop(self._at, None):
            try:
                self.n_copied += copying.result(env.timeout_s())
            except TimeoutError:
                raise Timeout(
                    f"the weights of a layer were not read from the file within {env.timeout_s()} s"
                ) from None
            self._flush()

    def _start(self, k: int) -> None:
        layer, later = self._layers[k], self._later[k]
        if layer.matrices or not later.issuperset(layer.stacks):
            self._copying[k] = self._thread.submit(self._copy_layer, layer, later)

    @staticmethod
    def _copy_layer(layer: _Layer, later: frozenset[str]) -> int:
        ahead = (name for name in layer.stacks if name not in later)
        experts = (pairs for name in ahead for pairs in layer.pairs(name, range(len(layer.stacks[name]))))
        return _copy(layer.matrices) + sum(map(_copy, experts))

    def _copy_experts(self, fetch: Fetch) -> None:
        device = next((d for d in fetch.devices if not self._devices[d].node), None)
        if device is None:  # another node computes the layer
            return
        view = self._used[device]
        assert view is not None
        self._devices[device].invalidate(view.buffer)  # type: ignore[arg-type]
        layer = self._layers[self._at]
        used = np.unique(bytes_of(view, 4 * fetch.n_ids).view(np.uint32))
        for name in fetch.stacks:
            experts = used[used < len(layer.stacks[name])].tolist()  # larger ids are of padding rows
            self.n_copied += sum(map(_copy, layer.pairs(name, experts)))
        self._flush()

    def _flush(self) -> None:
        for device, buffer in self._layers[self._at].buffers:
            device.flush(buffer)

    def close(self) -> None:
        """Wait until running copies end. Call this before the devices free their memory."""
        self._thread.shutdown(cancel_futures=True)
        self._layers.clear()


def _copy(pairs: Sequence[Pair]) -> int:
    """Return how many bytes were copied."""
    for target, source in pairs:
        copy_into(target, source)
    return sum(source.size for _, source in pairs)


def copied_later(meetings: Sequence[object]) -> list[frozenset[str]]:
    """For each layer, return the stacks whose experts are copied after the router. The list is empty if the
    step reads no layer from the file. `meetings` end the step's segments."""
    later: list[frozenset[str]] = []
    for meeting in meetings:
        if isinstance(meeting, Fetch):
            if meeting.stacks:
                later[-1] |= frozenset(meeting.stacks)
            else:
                later.append(frozenset())
    return later
