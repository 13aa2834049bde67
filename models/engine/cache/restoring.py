"""Restores blocks from host memory and files into a slot, a limited number of bytes between two steps.

If a part of a block cannot be read, the positions from this block on are computed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field

from vkbackend.errors import OutOfDeviceMemory
from vkbackend.models.engine.cache.block_parts import Cell, Parts
from vkbackend.models.engine.cache.block_store import BlockStore
from vkbackend.models.engine.cache.mark import Mark
from vkbackend.models.engine.cache.prefix_cache import PrefixCache
from vkbackend.models.engine.cache.prefix_tree import Key, Node, digest_of, key_of
from vkbackend.models.placement.recurrent_state import SlotStates
from vkbackend.ops import CELL_BLOCK

BATCH_NBYTES = 16 << 20  # maximum bytes that are written to the devices at once
SLICE_NBYTES = 64 << 20  # maximum bytes that are restored between two steps
AHEAD_NBYTES = 64 << 20  # maximum bytes that are read from files ahead
READ_S = 10.0  # If reading a part takes longer, the file system counts as hanging.


@dataclass(slots=True)
class Restore:
    """Loads blocks `at` to `end` - 1 into a slot. `lows` holds each group's first block that is needed."""

    slot: int
    at: int
    end: int
    names: list[str]
    keys: list[Key]
    lows: list[int]
    used_ns: int
    reads: deque[tuple[int, int, Future[bytes | None]]] = field(default_factory=deque)
    n_read: int = 0  # blocks whose reads have begun
    n_waiting: int = 0  # bytes of `reads`


class Restoring:
    def __init__(
        self, parts: Parts, store: BlockStore, cache: PrefixCache, states: SlotStates | None
    ) -> None:
        self._parts, self._store, self._cache, self._states = parts, store, cache, states
        self._state = len(parts.nbytes) - 1  # the part with the recurrent state
        self.n_restored = 0

    @property
    def is_plain(self) -> bool:
        """Return whether a sequence can continue after any block: no layer has a window or a state."""
        return self._states is None and len(self._cache.groups) == 1

    def find(self, tokens: Sequence[int], n: int, mark: Mark, n_known: int) -> Restore | None:
        """Return the longest stored prefix of `tokens[:n]` from which a sequence can continue, if it has more
        than `n_known` blocks."""
        names: list[str] = []
        keys: list[Key] = []
        nodes: list[Node | None] = []
        node: Node | None = self._cache.tree.root
        digest = self._parts.identity
        for begin in range(0, n // CELL_BLOCK * CELL_BLOCK, CELL_BLOCK):
            key = key_of(tokens, begin, mark)
            node = node.children.get(key) if node else None
            digest = node.digest if node and node.digest else digest_of(digest, key)
            if node:
                node.digest = digest
            name = digest.hex()
            if not self._has(node, name, 0):
                break
            names.append(name)
            keys.append(key)
            nodes.append(node)
        for end in range(len(names), n_known, -1):
            lows = [max(0, end - group.pool.seen) if group.pool.seen else 0 for group in self._cache.groups]
            if self._continues(nodes[end - 1], names[end - 1]) and all(
                self._has(nodes[i], names[i], part)
                for part, low in enumerate(lows[1:], 1)
                for i in range(low, end)
            ):
                return Restore(-1, n_known, end, names[:end], keys[:end], lows, time.time_ns())
        return None

    def _has(self, node: Node | None, name: str, part: int) -> bool:
        is_here = node is not None and node.blocks[part] >= 0
        return is_here or not self._parts.nbytes[part] or f"{name}.{part}" in self._store

    def _continues(self, node: Node | None, name: str) -> bool:
        is_here = node is not None and node.state is not None
        return is_here or self._states is None or f"{name}.{self._state}" in self._store

    def begin(self, restore: Restore, slot: int, n_known: int) -> bool:
        """Allocate the blocks of a slot that has `n_known` blocks. Return False if too few blocks are
        free."""
        restore.slot, restore.at = slot, n_known
        for group in self._cache.groups:
            group.move_window(slot, self._cache.nodes[slot], restore.end * CELL_BLOCK)
        return self._cache.reserve(slot, restore.end * CELL_BLOCK)

    def advance(self, restore: Restore, tokens: Sequence[int], mark: Mark) -> bool:
        """Restore up to SLICE_NBYTES. No step may be in flight. If a part cannot be read, only the blocks
        before it are restored. Return whether the slot can continue after block `restore.at`."""
        nbytes = 0
        while restore.at < restore.end and nbytes < SLICE_NBYTES:
            writes: list[tuple[Cell, bytes]] = []
            size, first, node = 0, restore.at, self._cache.last(restore.slot)
            here: Node | None = node
            is_whole = True
            while restore.at < restore.end and size < BATCH_NBYTES:
                here = here.children.get(restore.keys[restore.at]) if here else None
                block = self._take(restore, here)
                if block is None:
                    is_whole = False
                    break
                writes += block
                size += sum(len(data) for _, data in block)
                restore.at += 1
            try:
                self._parts.write([(cell, data) for cell, data in writes if cell[0] != self._state])
            except (MemoryError, OutOfDeviceMemory):  # no room for a staging buffer
                restore.at = restore.end = first
                return self.is_plain
            self._cache.stored(restore.slot, tokens, restore.at * CELL_BLOCK, mark)
            if restore.at == restore.end and is_whole:
                self._restore_state(restore, writes)
            self.n_restored += restore.at - first
            nbytes += size
            if not is_whole:
                restore.end = restore.at
                return self.is_plain
        return True

    def _needed(self, restore: Restore, index: int, node: Node | None) -> list[int]:
        parts = [
            part
            for part, low in enumerate(restore.lows)
            if index >= low and self._parts.nbytes[part] and not (node and node.blocks[part] >= 0)
        ]
        if self._states is not None and index == restore.end - 1 and not (node and node.state is not None):
            parts.append(self._state)
        return parts

    def _take(self, restore: Restore, node: Node | None) -> list[tuple[Cell, bytes]] | None:
        """Return the cells and bytes of the next block's parts, or None if a part cannot be read."""
        index, block = restore.at, []
        self._read_ahead(restore)
        read: dict[int, Future[bytes | None]] = {}
        while restore.reads and restore.reads[0][0] <= index:
            at, part, future = restore.reads.popleft()
            restore.n_waiting -= self._parts.nbytes[part]
            if at == index:
                read[part] = future
        for part in self._needed(restore, index, node):
            future = read.get(part) or self._begin_read(restore, index, part)
            try:
                data = future.result(READ_S)
            except FutureTimeout:
                self._store.wait_for(future)
                data = None
            if data is None:
                return None
            cell = -1 if part == self._state else self._cache.own_block(restore.slot, part, index)
            block.append(((part, cell), data))
        return block

    def _read_ahead(self, restore: Restore) -> None:
        """Begin to read blocks whose nodes are not in the tree."""
        restore.n_read = max(restore.n_read, restore.at)
        while restore.n_read < restore.end and restore.n_waiting < AHEAD_NBYTES:
            for part in self._needed(restore, restore.n_read, None):
                if f"{restore.names[restore.n_read]}.{part}" in self._store:
                    restore.reads.append(
                        (restore.n_read, part, self._begin_read(restore, restore.n_read, part))
                    )
                    restore.n_waiting += self._parts.nbytes[part]
            restore.n_read += 1

    def _begin_read(self, restore: Restore, index: int, part: int) -> Future[bytes | None]:
        used_ns = restore.used_ns - 1000 * index  # as in HostTier
        return self._store.begin_read(f"{restore.names[index]}.{part}", self._parts.nbytes[part], used_ns)

    def _restore_state(self, restore: Restore, writes: Sequence[tuple[Cell, bytes]]) -> None:
        if self._states is None:
            return
        slot, position, node = restore.slot, restore.end * CELL_BLOCK, self._cache.last(restore.slot)
        if node.state is not None:
            self._cache.snapshots.lend(slot, position, node)
            return
        self._cache.snapshots.drop(slot)
        cell = self._states.put(slot, position)
        self._parts.write([((self._state, cell), data) for (part, _), data in writes if part == self._state])
