from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from vkbackend.buffer import ALIGN, Buffer, Home, View, nowhere
from vkbackend.errors import PlanError
from vkbackend.memory import allocate
from vkbackend.meta.load import Load, Progress, Source, load_weights
from vkbackend.meta.split import MIRRORED, State
from vkbackend.meta.staged_experts import StagedExperts, streamed_stacks
from vkbackend.meta.streamed_weights import by_layer
from vkbackend.meta.streams import Stream
from vkbackend.meta.tensor import SlotTable, Weight
from vkbackend.pages import Pages
from vkbackend.runtime import Device


class Stores:
    """`changing` maps names to caches and constants. `load_s` is the time to load the weights, in seconds."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self.weights: dict[str, Weight] = {}
        self.changing: dict[str, Weight] = {}
        self.pages: list[Pages] = []
        self.stream: Stream | None = None
        self.staged: StagedExperts | None = None
        self.load_s = 0.0

    def load(self, loads: Sequence[Load], source: Source, progress: Progress | None = None) -> None:
        began = time.perf_counter()
        weights, pages = load_weights(self._devices, loads, source, progress)
        if by_layer(loads):
            self.stream = Stream(self._devices, loads, weights, source)
        self.load_s += time.perf_counter() - began
        self.weights |= weights
        self.pages += pages

    def slots(self, d: int, shapes: list[tuple[tuple[int, ...], str]]) -> list[View]:
        """Allocate device `d`'s slots for experts."""
        return allocate(self._devices[d], shapes, Home.WEIGHTS, "expert slots")

    def stage_experts(
        self, layers: Mapping[str, Sequence[Load]], tables: Mapping[str, SlotTable], source: Source
    ) -> StagedExperts | None:
        """Allocate memory for experts from the file, if layers with slots stay there."""
        if streamed := streamed_stacks(layers, tables):
            self.staged = StagedExperts(self._devices, streamed, source)
        return self.staged

    def cache(
        self, name: str, n_cells: int, width: int, dtype: str, state: State, home: Home = Home.KV
    ) -> Weight:
        """Allocate a cache [n_cells, width], whose columns are split by `state`.

        Raises PlanError if a device's share exceeds one binding, because shaders bind a cache once.
        """
        weight = Weight(name, (n_cells, width), dtype, state, [])
        for d, device in enumerate(self._devices):
            pieces = []
            if n := state.count(d):
                probe = View(nowhere(home, name), 0, (n_cells, n), dtype)
                if probe.nbytes > (limit := device.limits.max_storage_range):
                    raise PlanError(
                        f"{name} of {n_cells} cells takes {probe.nbytes} bytes on {device.name}, "
                        f"which reads {limit} at once; use a smaller context, fewer slots or more devices"
                    )
                pieces = [(0, replace(probe, buffer=device.buffer(probe.nbytes, home, name)))]
            weight.pieces.append(pieces)
        self.changing[name] = weight
        return weight

    def constant(self, name: str, values: np.ndarray) -> Weight:
        """Store a small u32 array on every device. `update` changes the array between steps."""
        weight = Weight(name, values.shape, "u32", MIRRORED, [])
        for device in self._devices:
            buffer = device.buffer(max(values.nbytes, ALIGN), Home.KV, name)
            weight.pieces.append([(0, View(buffer, 0, values.shape, "u32"))])
        self.changing[name] = weight
        self.update(weight, values)
        return weight

    def zeros(self, name: str, shape: tuple[int, ...], home: Home = Home.KV) -> Weight:
        """Allocate f32 zeros on every device. Steps change the values."""
        weight, values = Weight(name, shape, "f32", MIRRORED, []), np.zeros(shape, np.float32)
        for device in self._devices:
            view = View(device.buffer(values.nbytes, home, name), 0, shape)
            device.write(view, values)
            weight.pieces.append([(0, view)])
        self.changing[name] = weight
        return weight

    def update(self, weight: Weight, values: np.ndarray, row: int = 0, column: int = 0) -> None:
        """Write consecutive values, beginning at (row, column)."""
        offset = 4 * (row * weight.shape[-1] + column)
        for d, device in enumerate(self._devices):
            whole = weight.whole(d)
            device.write(View(whole.buffer, whole.offset + offset, values.shape, whole.dtype), values)

    def mapped_nbytes(self, d: int) -> int:
        views = [view for weight in self.weights.values() for _, view in weight.pieces[d]]
        return sum(v.nbytes for v in views if isinstance(v.buffer, Buffer) and v.buffer.home is Home.MAPPED)

    def pages_nbytes(self) -> int:
        return sum(pages.nbytes for pages in self.pages if pages.home is Home.PAGES)
