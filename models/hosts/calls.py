"""Sends calls from node 0 to the other nodes, and their replies to node 0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vkbackend.errors import DeviceLost
from vkbackend.meta.transport import Lane, Transport
from vkbackend.models.hosts import node_messages

JOIN_S = 120.0  # Limit for opening devices and reading the model's header.
RECORD_S = 900.0  # Limit for recording and compiling a step, if heartbeats arrive.
MAX_REPLY_NBYTES = 1 << 20  # Limit of a reply in bytes while nodes join.


class Calls:
    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    @property
    def leads(self) -> bool:
        return self.transport.rank == 0

    @property
    def lost(self) -> str:
        return self.transport.lost

    @property
    def names(self) -> list[str]:
        return self.transport.names

    def tell(self, call: Any) -> None:
        """Raises DeviceLost if the group is broken."""
        if self.lost:
            raise DeviceLost(f"{self.lost}; open the model again")
        data = node_messages.encode(call)
        for node in self.transport.others:
            self.transport.send(node, Lane.CALL, data)

    def tell_one(self, node: int, call: Any) -> None:
        self.transport.send(node, Lane.CALL, node_messages.encode(call))

    def ask(self, node: int, call: Any) -> bytes:
        self.tell_one(node, call)
        return self.transport.receive(node, Lane.REPLY, node_messages.MAX_REPLY_NBYTES, "an answer", None)

    def replies(self, type_: Any, name: str, timeout_s: float) -> Iterator[tuple[int, Any]]:
        """Yield (node, reply of `type_`). `name` is the reply's name in error messages."""
        for node in self.transport.others:
            data = self.transport.receive(node, Lane.REPLY, MAX_REPLY_NBYTES, name, timeout_s)
            yield node, node_messages.decode(data, type_, self.names[node])

    def answer_all(self, message: Any) -> None:
        for node in self.transport.others:
            self.transport.send(node, Lane.REPLY, node_messages.encode(message))

    def reply(self, data: bytes) -> None:
        self.transport.send(0, Lane.REPLY, data)

    def answer(self, type_: Any, name: str, timeout_s: float) -> Any:
        data = self.transport.receive(0, Lane.REPLY, MAX_REPLY_NBYTES, name, timeout_s)
        return node_messages.decode(data, type_, self.names[0])

    def next_call(self, timeout_s: float) -> Any:
        data = self.transport.receive(0, Lane.CALL, node_messages.MAX_CALL_NBYTES, "the next call", timeout_s)
        return node_messages.decode(data, node_messages.Call, self.names[0])

    def expect(self, type_: Any, timeout_s: float) -> Any:
        call = self.next_call(timeout_s)
        if isinstance(call, node_messages.End):
            raise DeviceLost(f"{self.names[0]} gave up; its own message says why")
        if not isinstance(call, type_):
            raise DeviceLost(f"{self.names[0]} sent an unexpected {type(call).__name__}")
        return call
