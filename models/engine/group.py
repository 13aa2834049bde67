"""What a runner needs of the nodes that run its model together; models/hosts/group.py has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from vkbackend.limits import Limits
from vkbackend.meta.hosts import Hosts
from vkbackend.meta.mesh import Mesh
from vkbackend.meta.step_kind import Wanted
from vkbackend.models.engine.micro_batch import MicroBatch
from vkbackend.models.options import Options
from vkbackend.rope import RopeTable
from vkbackend.runtime import Device


class Group(Protocol):
    """`leads`: this node has the engine. `sends_tables`: others round cos and sin differently, so `step` gets
    the rows of this node."""

    hosts: Hosts
    sends_tables: bool

    @property
    def leads(self) -> bool: ...

    @property
    def lost(self) -> str:
        """Why the group is broken; empty while it works."""

    def open(self, options: Options, interleave: bool | None) -> None:
        """Let the other nodes begin to load."""

    def join(
        self, options: Options, open_devices: Callable[[Sequence[str]], list[Device]], *, speeds: bool
    ) -> list[Device]:
        """The devices of all nodes, in order: opened here, stand-ins elsewhere."""

    def settle(self, options: Options) -> Options:
        """The options with the shares and layers that the leader decided."""

    def compare(
        self,
        model: str,
        options: Options,
        plan: str,
        limits: Sequence[Limits],
        sizes: object,
        ropes: Mapping[str, RopeTable],
    ) -> None:
        """Raises PlanError if a node differs in anything that must be equal."""

    def loaded(self, mesh: Mesh) -> None:
        """Wait until all nodes have loaded."""

    def step(self, batch: MicroBatch, wanted: Wanted, tables: Mapping[str, np.ndarray] | None = None) -> None:
        """Let the other nodes run a micro-batch."""

    def memory(self) -> dict[int, dict[str, Any]]:
        """The memory reports of the devices elsewhere."""

    def close(self) -> None:
        """End the group."""
