"""The nodes that run one model, with a runner's interface to them. Node 0 leads, and the others follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np

from vkbackend.errors import DeviceLost, VkbackendError
from vkbackend.meta.elsewhere import Elsewhere
from vkbackend.meta.gather import PIECE_NBYTES
from vkbackend.meta.mesh import Mesh
from vkbackend.meta.nodes import Nodes
from vkbackend.meta.pulse import Pulse
from vkbackend.meta.step_kind import StepKind, Wanted
from vkbackend.meta.transport import Lane, Transport
from vkbackend.models.engine.runner.micro_batch import MicroBatch
from vkbackend.models.hosts import node_messages
from vkbackend.models.hosts.calls import RECORD_S, Calls
from vkbackend.models.hosts.joining import Joining


class Group(Calls):
    """If `pulse` is set, the node sends heartbeats and watches other nodes' heartbeats. Nodes in threads of
    one process need no `pulse`. `where` is a text with this node's interface and ports."""

    def __init__(self, transport: Transport, *, pulse: bool = True, where: str = "") -> None:
        super().__init__(transport)
        self.joining, self.where = Joining(self), where
        self.pulse = Pulse(transport) if pulse else None
        self._ended = False
        self.images: list[tuple[int, np.ndarray]] = []  # Node 0 has sent these rows for the next step.

    @property
    def nodes(self) -> Nodes:
        return self.joining.nodes

    def loaded(self, mesh: Mesh) -> None:
        """Wait until every node has loaded its part. Node 0 then has access to all devices."""
        self.joining.compare_providers(mesh.provider.name if mesh.provider else "nothing")
        self.transport.meet("the others to load the model", RECORD_S)
        if self.leads:
            mesh.steps.while_recording = self._recording
            for device in mesh.devices:
                if isinstance(device, Elsewhere):
                    device.link = self

    @contextmanager
    def _recording(self, kind: StepKind) -> Iterator[None]:
        """Make the other nodes record the same step at the same time."""
        self.tell(node_messages.Record.of(kind))
        try:
            yield
        except BaseException as error:  # Only node 0 has not recorded this step.
            self.transport.lost = f"{self.names[0]} could not record a step: {error}"
            raise
        self.recorded()

    def recorded(self) -> None:
        self.transport.meet("the others to record a step", RECORD_S)

    def step(self, batch: MicroBatch, wanted: Wanted, tables: Mapping[str, np.ndarray] | None = None) -> None:
        """Send a step to the other nodes. `tables` maps the name of each RoPE table to the rows of cos and
        sin that the other nodes need."""
        for first, values in batch.images.rows if batch.images else ():
            n = max(1, PIECE_NBYTES // values[0].nbytes)
            for at in range(0, len(values), n):
                piece = np.ascontiguousarray(values[at : at + n])
                self.tell(node_messages.Images(first + at, len(piece), piece.tobytes()))
        self.tell(node_messages.Step.of(batch, wanted, tables))

    def shift(
        self, slot: int, first: int, end: int, distance: int, cos_sin: Mapping[str, np.ndarray]
    ) -> None:
        """Send a context shift to the other nodes. `cos_sin` maps the name of each RoPE table to cos and sin
        of the rotation."""
        rope = {name: rows.tobytes() for name, rows in cos_sin.items()}
        self.tell(node_messages.Shift(slot, first, end, distance, rope))

    def write(self, device: int, name: str, offset: int, data: np.ndarray) -> None:
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        for at in range(0, raw.size, PIECE_NBYTES):
            call = node_messages.Write(device, name, offset + at, raw[at : at + PIECE_NBYTES].tobytes())
            self.tell_one(self.nodes.of[device], call)

    def read(self, device: int, name: str, offset: int, nbytes: int) -> np.ndarray:
        node, out = self.nodes.of[device], np.empty(nbytes, np.uint8)
        for at in range(0, nbytes, PIECE_NBYTES):
            n = min(PIECE_NBYTES, nbytes - at)
            data = self.ask(node, node_messages.Read(device, name, offset + at, n))
            if len(data) != n:
                raise DeviceLost(f"{self.names[node]} sent {len(data)} bytes of {name}, expected {n}")
            out[at : at + n] = np.frombuffer(data, np.uint8)
        return out

    def read_many(self, device: int, ranges: Sequence[tuple[str, int, int]]) -> list[np.ndarray]:
        """Read ranges (name, offset, bytes), as many in a call as fit in a reply."""
        node, out = self.nodes.of[device], list[np.ndarray]()
        while len(out) < len(ranges):
            rest = ranges[len(out) : len(out) + node_messages.MAX_COPIES]
            ends = [end for end in accumulate(nbytes for *_, nbytes in rest) if end <= PIECE_NBYTES]
            if not ends:
                out.append(self.read(device, *rest[0]))
                continue
            call = node_messages.ReadMany(device, [node_messages.Range(*r) for r in rest[: len(ends)]])
            if len(data := self.ask(node, call)) != ends[-1]:
                raise DeviceLost(f"{self.names[node]} sent {len(data)} bytes, expected {ends[-1]}")
            out += np.split(np.frombuffer(data, np.uint8), ends[:-1])
        return out

    def copy(self, device: int, copies: list[tuple[str, int, int, int]]) -> None:
        for at in range(0, len(copies), node_messages.MAX_COPIES):
            part = [node_messages.CopyData(*copy) for copy in copies[at : at + node_messages.MAX_COPIES]]
            self.tell_one(self.nodes.of[device], node_messages.CopyRanges(device, part))

    def memory(self) -> dict[int, dict[str, Any]]:
        """Return the other nodes' memory by device, or an empty dict on a follower."""
        reports: dict[int, dict[str, Any]] = {}
        for node in self.transport.others if self.leads else ():
            data = self.ask(node, node_messages.AskMemory())
            reports |= node_messages.decode(data, node_messages.MemoryReport, self.names[node]).devices
        return reports

    def on_lost(self, tell: Callable[[VkbackendError], None]) -> None:
        if self.pulse:
            self.pulse.on_lost = lambda: tell(DeviceLost(f"{self.lost}; open the model again"))

    def fail(self, words: str) -> None:
        for node in [0] if self.transport.rank else self.transport.others:
            self.transport.send(node, Lane.FAILURE, words.encode()[:4000])

    def leave(self) -> None:
        if self.pulse:
            self.pulse.close()
        self.transport.close()

    def close(self) -> None:
        """End the group from node 0, unless the group is broken."""
        if self.leads and not self.lost and not self._ended:
            self._ended = True
            self.tell(node_messages.End())
