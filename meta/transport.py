"""Move bytes between nodes, with a deadline for every wait.

Messages between two nodes are in order per lane. When a node is lost, every wait raises a DeviceLost that
names the node.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np

from vkbackend import env
from vkbackend.errors import DeviceLost, Timeout
from vkbackend.system.waiting import give_way

# A wait polls for this long and then sleeps, because polling takes processor cores from software devices.
SPIN_S = 0.02
SLEEP_S = 1e-3


class Lane(IntEnum):
    """A purpose of messages. Messages in the same lane arrive in order."""

    CALL = 1
    REPLY = 2
    SLOT = 3  # Shares of a reduce.
    OUTPUT = 4  # Logits and candidates.
    MEET = 5
    BEAT = 6
    FAILURE = 7


Part = tuple[int, np.ndarray]  # (node, bytes at a fixed address)


class Transfers(ABC):
    def run(self) -> None:
        """Raises DeviceLost, Timeout."""
        self.start()
        self.finish()

    @abstractmethod
    def start(self) -> None:
        """The memory for received bytes must be unused. Raises DeviceLost."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for all started transfers. Raises DeviceLost, Timeout."""

    @abstractmethod
    def close(self) -> None:
        """Free the transfers. None may be in progress."""


class Transport(ABC):
    """This node's connections to the other nodes. This node has number `rank` of `size`, and node 0 leads.
    `n_messages` and `n_bytes` count sent messages, without heartbeats."""

    rank: int
    size: int

    def __init__(self) -> None:
        self.names = [f"node {rank}" for rank in range(self.size)]
        self.lost = ""  # why the group ended, or empty
        self.n_messages = self.n_bytes = 0

    @property
    def others(self) -> list[int]:
        return [node for node in range(self.size) if node != self.rank]

    @abstractmethod
    def send(self, node: int, lane: Lane, data: bytes, purpose: str = "") -> None:
        """Raises DeviceLost, Timeout."""

    @abstractmethod
    def beat(self, node: int) -> None:
        """Send a heartbeat without waiting."""

    @abstractmethod
    def poll(self, node: int, lane: Lane, most: int) -> bytes | None:
        """Return the next message, or None if none has arrived. Raises DeviceLost if the message exceeds
        `most` bytes."""

    @abstractmethod
    def transfers(
        self, sent: Sequence[Part], received: Sequence[Part], purpose: str, lane: Lane = Lane.SLOT
    ) -> Transfers:
        """Return transfers that send and receive these parts in a lane. Both nodes must list the parts in the
        same order."""

    def close(self) -> None:  # noqa: B027 - a twin has nothing to leave
        """Leave the group. All nodes must call this function."""

    def receive(
        self, node: int, lane: Lane, most: int, purpose: str, timeout_s: float | None = None
    ) -> bytes:
        """Wait for a message. The default of `timeout_s` is VKBACKEND_TIMEOUT. Raises DeviceLost, Timeout."""
        messages: list[bytes] = []

        def came() -> bool:
            if (message := self.poll(node, lane, most)) is not None:
                messages.append(message)
            return bool(messages)

        self.wait(came, f"{purpose} of {self.names[node]}", timeout_s)
        return messages[0]

    def wait(self, done: Callable[[], bool], purpose: str, timeout_s: float | None = None) -> None:
        """Wait until `done()`. Raises DeviceLost if a node is lost, or Timeout after the deadline."""
        began, limit = 0.0, 0.0
        while not done():
            now = time.monotonic()
            if not began:
                began, limit = now, env.timeout_s() if timeout_s is None else timeout_s
            if self.lost:
                raise DeviceLost(f"{self.lost}; start the group again")
            if now - began > limit:
                raise Timeout(
                    f"{self.names[self.rank]} waited {now - began:.0f} s for {purpose}; close the model and "
                    "start the group again (VKBACKEND_TIMEOUT sets the limit in seconds)"
                )
            if now - began > SPIN_S:
                time.sleep(SLEEP_S)
            else:
                give_way()

    def meet(self, purpose: str, timeout_s: float) -> None:
        if self.rank:
            self.send(0, Lane.MEET, b"")
            self.receive(0, Lane.MEET, 0, purpose, timeout_s)
            return
        for node in self.others:
            self.receive(node, Lane.MEET, 0, purpose, timeout_s)
        for node in self.others:
            self.send(node, Lane.MEET, b"")

    def too_long(self, node: int, lane: Lane, nbytes: int, most: int) -> DeviceLost:
        return DeviceLost(
            f"{self.names[node]} sent a {lane.name.lower()} of {nbytes} bytes, more than the limit of "
            f"{most}; use the same version of vkbackend on all nodes"
        )

    def _count(self, lane: Lane, nbytes: int) -> None:
        if lane is not Lane.BEAT:
            self.n_messages += 1
            self.n_bytes += nbytes


# ---- the twin ----


class _Mail:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.boxes: dict[tuple[int, int, Lane], deque[bytes]] = {}

    def put(self, sender: int, receiver: int, lane: Lane, data: bytes) -> None:
        with self.lock:
            self.boxes.setdefault((sender, receiver, lane), deque()).append(data)

    def take(self, sender: int, receiver: int, lane: Lane) -> bytes | None:
        with self.lock:
            box = self.boxes.get((sender, receiver, lane))
            return box.popleft() if box else None


class TwinTransport(Transport):
    """A transport between nodes that are threads of one process."""

    def __init__(self, rank: int, size: int, mail: _Mail) -> None:
        self.rank, self.size, self._mail = rank, size, mail
        super().__init__()

    @classmethod
    def group(cls, size: int) -> list[TwinTransport]:
        mail = _Mail()
        return [cls(rank, size, mail) for rank in range(size)]

    def send(self, node: int, lane: Lane, data: bytes, purpose: str = "") -> None:
        self._count(lane, len(data))
        self._mail.put(self.rank, node, lane, bytes(data))

    def beat(self, node: int) -> None:
        self._mail.put(self.rank, node, Lane.BEAT, b"")

    def poll(self, node: int, lane: Lane, most: int) -> bytes | None:
        data = self._mail.take(node, self.rank, lane)
        if data is not None and len(data) > most:
            raise self.too_long(node, lane, len(data), most)
        return data

    def transfers(
        self, sent: Sequence[Part], received: Sequence[Part], purpose: str, lane: Lane = Lane.SLOT
    ) -> Transfers:
        return _TwinTransfers(self, sent, received, purpose, lane)


class _TwinTransfers(Transfers):
    def __init__(
        self,
        transport: TwinTransport,
        sent: Sequence[Part],
        received: Sequence[Part],
        purpose: str,
        lane: Lane = Lane.SLOT,
    ) -> None:
        self._transport, self._purpose, self._lane = transport, purpose, lane
        self._sent, self._received = sent, received

    def start(self) -> None:
        for node, part in self._sent:
            self._transport.send(node, self._lane, part.tobytes())

    def finish(self) -> None:
        for node, part in self._received:
            data = self._transport.receive(node, self._lane, part.nbytes, self._purpose)
            part[:] = np.frombuffer(data, np.uint8)

    def close(self) -> None:
        pass
