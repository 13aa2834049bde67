"""The interface between a runner and its group of nodes (models/hosts/group.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from vkbackend.limits import Limits
from vkbackend.meta.mesh import Mesh
from vkbackend.meta.nodes import Nodes
from vkbackend.meta.step_kind import Wanted
from vkbackend.models.engine.runner.micro_batch import MicroBatch
from vkbackend.models.options import Options
from vkbackend.rope import RopeTable
from vkbackend.runtime import Device

# Opens devices by name; None opens the best device.
OpenDevices = Callable[[Sequence[str] | None], list[Device]]


class Joining(Protocol):
    """`leads` is True on the node that runs the engine and decides. If `sends_tables`, each step sends this
    node's rows of cos and sin."""

    nodes: Nodes
    sends_tables: bool

    @property
    def leads(self) -> bool: ...

    def open(self, options: Options, interleave: bool | None) -> None: ...

    def join(self, options: Options, open_devices: OpenDevices, *, speeds: bool) -> list[Device]: ...

    def settled(self, options: Options) -> Options: ...

    def settle(self, options: Options, *, fitted: bool) -> None: ...

    def compare(
        self,
        model: str,
        options: Options,
        plan: str,
        limits: Sequence[Limits],
        sizes: object,
        ropes: Mapping[str, RopeTable],
    ) -> None: ...


class Group(Protocol):
    @property
    def joining(self) -> Joining: ...

    @property
    def lost(self) -> str: ...

    def loaded(self, mesh: Mesh) -> None: ...

    def step(
        self, batch: MicroBatch, wanted: Wanted, tables: Mapping[str, np.ndarray] | None = None
    ) -> None: ...

    def shift(
        self, slot: int, first: int, end: int, distance: int, cos_sin: Mapping[str, np.ndarray]
    ) -> None: ...

    def memory(self) -> dict[int, dict[str, Any]]: ...

    def close(self) -> None: ...
