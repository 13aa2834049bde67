"""The nodes of a group, their devices, and the bytes that each exchange transfers.

A node sends its devices' slots to the nodes that read them. A slot has the same offset in the pages of every
node. Devices sum in slot order, so all nodes get the same bits as a single node would.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vkbackend.buffer import Buffer, View
from vkbackend.meta import ways
from vkbackend.meta.host_sum import HostSum
from vkbackend.meta.reduce import Provider, Reduce, ReduceSlots, parts_of
from vkbackend.meta.transport import Lane, Part, Transfers, Transport
from vkbackend.runtime import Device
from vkbackend.wire import wire_words


class Nodes:
    def __init__(self, transport: Transport, of: Sequence[int]) -> None:
        self.transport, self.of = transport, tuple(of)
        self._gathers: dict[Hashable, Transfers] = {}

    @property
    def rank(self) -> int:
        return self.transport.rank

    def is_here(self, device: int) -> bool:
        return self.of[device] == self.rank

    def gather(self, key: Hashable, views: Sequence[View | None]) -> Transfers:
        """Return transfers that copy each device's bytes at `views[d]` to its stand-in on node 0. Equal
        values of `key` must have equal views. The transfers use a separate lane, because node 0 may wait for
        them before other exchanges."""
        transfers = self._gathers.get(key)
        if transfers is None:
            sent: list[Part] = []
            received: list[Part] = []
            for node, view in zip(self.of, views, strict=True):
                if view is None:
                    continue
                part = np.asarray(view.buffer.host)[view.offset : view.end]  # type: ignore[union-attr]
                if self.rank == 0 and node:
                    received.append((node, part))
                elif self.rank and node == self.rank:
                    sent.append((0, part))
            transfers = self.transport.transfers(sent, received, "logits", Lane.OUTPUT)
            self._gathers[key] = transfers
        return transfers

    def close(self) -> None:
        for transfers in self._gathers.values():
            transfers.close()
        self._gathers.clear()


@dataclass(slots=True)
class _Exchange:
    transfers: Transfers
    to_send: list[tuple[Device, Buffer]]
    to_fill: list[tuple[Device, Buffer]]
    local: Reduce | None  # The sum on this node after the transfers, if a device of this node reads it.
    part: tuple[int, int] = (0, 0)  # The elements begin..end that this node sums, if each node sums a range.
    sums: Transfers | None = None  # Transfers that send the summed parts to every node.


class OverNodes(Provider):
    def __init__(self, inner: Provider, devices: Sequence[Device], nodes: Nodes) -> None:
        self.name, self.pages_nbytes, self.host_writes = inner.name, inner.pages_nbytes, inner.host_writes
        self._inner, self._devices, self._nodes = inner, devices, nodes
        self._exchanges: dict[Reduce, _Exchange] = {}

    def slot(self, device: int, reduce: Reduce) -> View:
        return self._inner.slot(device, reduce)

    def readable(self, device: int, reduce: Reduce) -> ReduceSlots:
        return self._inner.readable(device, reduce)

    def scatters(self, reduce: Reduce) -> bool:
        return self._inner.scatters(reduce)

    def gathered(self, device: int, reduce: Reduce) -> View:
        return self._inner.gathered(device, reduce)

    def host_bytes(self, device: int, reduce: Reduce) -> np.ndarray:
        return self._inner.host_bytes(device, reduce)

    def exchange(self, reduce: Reduce) -> None:
        exchange = self._exchanges.get(reduce)
        if exchange is None:
            exchange = self._exchanges[reduce] = self._prepare(reduce)
        for device, buffer in exchange.to_send:
            device.invalidate(buffer)
        began = time.perf_counter()
        exchange.transfers.run()
        self.network_s += time.perf_counter() - began
        for device, buffer in exchange.to_fill:
            device.flush(buffer)
        if exchange.sums is None:
            if exchange.local:
                self._inner.exchange(exchange.local)
            return
        assert isinstance(self._inner, HostSum) and exchange.local
        if exchange.part[0] < exchange.part[1]:
            self._inner.add(exchange.local, *exchange.part)
        began = time.perf_counter()
        exchange.sums.run()
        self.network_s += time.perf_counter() - began
        self._inner.spread(exchange.local)

    def _prepare(self, reduce: Reduce) -> _Exchange:
        nodes, here = self._nodes, self._nodes.rank
        parts = self._parts(reduce)
        sent: list[Part] = []
        received: list[Part] = []
        for writer, target, begin, end in self._moves_to(reduce, parts) if parts else self._moves(reduce):
            part = self.host_bytes(writer, reduce)[begin:end]
            if nodes.of[writer] == here:
                sent.append((target, part))
            elif target == here:
                received.append((nodes.of[writer], part))
        readers = tuple(d for d in reduce.readers if nodes.is_here(d))
        at_work = [(d, self._devices[d]) for d in range(len(self._devices)) if nodes.is_here(d)]
        buffers: list[tuple[Device, Buffer]] = [
            (device, self._inner.slot(d, reduce).buffer)  # type: ignore[misc]
            for d, device in at_work
        ]
        purpose = f"their shares of a sum of {reduce.elements} elements"
        transfers = nodes.transport.transfers(sent, received, purpose)
        local = replace(reduce, readers=readers) if readers else None
        exchange = _Exchange(transfers, buffers if sent else [], buffers if received else [], local)
        if parts and local:
            exchange.part, exchange.sums = parts[here], self._gather(local, parts)
        return exchange

    # ---- when nodes sum ----

    def _parts(self, reduce: Reduce) -> dict[int, tuple[int, int]]:
        """For a large reduce, return the elements that each reading node sums. Return {} if sending complete
        slots takes fewer bytes."""
        reading = sorted({self._nodes.of[d] for d in reduce.readers})
        if not isinstance(self._inner, HostSum) or 4 * reduce.elements < ways.SCATTER_NBYTES:
            return {}
        parts = dict(zip(reading, parts_of(reduce, len(reading)), strict=True))
        sums = sum(4 * (end - begin) * (len(reading) - 1) for begin, end in parts.values())
        in_parts = sum(end - begin for *_, begin, end in self._moves_to(reduce, parts)) + sums
        return parts if in_parts < sum(end - begin for *_, begin, end in self._moves(reduce)) else {}

    def _moves_to(
        self, reduce: Reduce, parts: Mapping[int, tuple[int, int]]
    ) -> list[tuple[int, int, int, int]]:
        moves = []
        for writer in reduce.writers:
            for node, part in parts.items():
                begin, end = (4 * wire_words(reduce.wire, at) for at in part)
                if node != self._nodes.of[writer] and begin < end:
                    moves.append((writer, node, begin, end))
        return moves

    def _gather(self, local: Reduce, parts: Mapping[int, tuple[int, int]]) -> Transfers:
        assert isinstance(self._inner, HostSum)
        here, total = self._nodes.rank, self._inner.total(local).view(np.uint8)
        part = total[4 * parts[here][0] : 4 * parts[here][1]]
        sent: list[Part] = [(node, part) for node in parts if node != here and part.size]
        received: list[Part] = [
            (node, total[4 * begin : 4 * end])
            for node, (begin, end) in parts.items()
            if node != here and begin < end
        ]
        purpose = f"their sums of parts of {local.elements} elements"
        return self._nodes.transport.transfers(sent, received, purpose)

    # ---- when devices sum ----

    def _moves(self, reduce: Reduce) -> list[tuple[int, int, int, int]]:
        """Return (device, node, begin, end) of each transfer. It sends bytes begin..end of the device's slot
        to the node. The order is the same on all nodes. If `reduce.gather` is set, the bytes are sums that
        the device computed, not shares."""
        of, n = self._nodes.of, len(self._nodes.of)
        reading = sorted({of[d] for d in reduce.readers})
        parts = parts_of(reduce, n) if self.scatters(reduce) else []
        if parts and reduce.gather:
            return [
                (d, node, 4 * begin, 4 * end)
                for d, (begin, end) in enumerate(parts)
                for node in reading
                if node != of[d] and begin < end
            ]
        moves = []
        for writer in reduce.writers:
            if not parts:
                nbytes = 4 * wire_words(reduce.wire, reduce.elements)
                moves += [(writer, node, 0, nbytes) for node in reading if node != of[writer]]
                continue
            for d, (begin, end) in enumerate(parts):
                if of[d] != of[writer] and begin < end:
                    words = [wire_words(reduce.wire, at) for at in (begin, end)]
                    moves.append((writer, of[d], 4 * words[0], 4 * words[1]))
        return moves

    def close_transfers(self) -> None:
        for exchange in self._exchanges.values():
            exchange.transfers.close()
            if exchange.sums:
                exchange.sums.close()
        self._exchanges.clear()

    def close(self) -> None:
        self.close_transfers()
        self._inner.close()
