"""Stores blocks that leave the devices in host memory and in files.

A block's name is a digest of the model, the adapters and all tokens up to the block's end. So other slots,
other devices and later processes find the block. Devices are read between steps, several blocks at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from vkbackend import env
from vkbackend.errors import OutOfDeviceMemory
from vkbackend.models.engine.cache.block_files import BlockFiles
from vkbackend.models.engine.cache.block_parts import Cell, Parts
from vkbackend.models.engine.cache.block_store import BlockStore
from vkbackend.models.engine.cache.layer_blocks import LayerBlocks
from vkbackend.models.engine.cache.prefix_cache import PrefixCache
from vkbackend.models.engine.cache.prefix_tree import Node, node_digest
from vkbackend.models.engine.cache.restoring import Restoring
from vkbackend.models.placement.recurrent_state import SlotStates

BATCH_NBYTES = 16 << 20  # maximum bytes that are read from the devices at once
BATCH_NODES = 64
ROOM_S = 0.05  # how long to wait for files to be written, before asking again
CLOSE_S = 6.0  # limit for writing at the end; the engine's process is killed after 10 s


class Served(Protocol):
    """The runner's attributes that a tier needs."""

    options: Any
    encodes: bool

    @property
    def states(self) -> SlotStates | None: ...

    def block_parts(self) -> Parts: ...


class HostTier:
    def __init__(
        self, parts: Parts, store: BlockStore, cache: PrefixCache, states: SlotStates | None
    ) -> None:
        self._parts, self._store, self._cache = parts, store, cache
        self.restoring = Restoring(parts, store, cache, states)
        self._state = len(parts.nbytes) - 1  # the part with the recurrent state
        self._kept_at = -1  # `cache.n_made` when all blocks were last stored
        self._n_kept, self._keep_s = 0, 0.0
        self._is_reported = False
        cache.leaving, cache.snapshots.leaving = self._leaving, self._state_leaving

    def stats(self) -> dict[str, float]:
        """Return counts, bytes, and the mean microseconds of the engine per block that it copies to the
        host."""
        return {
            "n_blocks_kept": self._n_kept,
            "n_blocks_restored": self.restoring.n_restored,
            "keep_block_us": 1e6 * self._keep_s / max(1, self._n_kept),
            **self._store.stats(),
        }

    def _leaving(self, node: Node, group: LayerBlocks) -> None:
        """Store the node's parts. To read the devices rarely, also store the parts that will leave them
        next."""
        missing = list(self._missing(node, group.group))
        nbytes = sum(self._parts.nbytes[part] for part, _ in missing)
        entries = [(node, cell) for cell in missing]
        if not entries:
            return
        for other in islice(group.unused, 1, BATCH_NODES):
            for cell in self._missing(other, group.group):
                entries.append((other, cell))
                nbytes += self._parts.nbytes[cell[0]]
            if nbytes >= BATCH_NBYTES:
                break
        self._keep(entries)

    def _state_leaving(self, node: Node) -> None:
        if node.ends_prompt and node.state is not None and self._name(node, self._state) not in self._store:
            self._keep([(node, (self._state, node.state))])

    def _missing(self, node: Node, group: int = 0) -> Iterator[Cell]:
        """Yield the node's cells that are not stored. If `group` is 0, yield the cells of all groups and the
        state."""
        for part in range(len(node.blocks)) if group == 0 else (group,):
            if node.blocks[part] >= 0 and self._parts.nbytes[part]:
                if self._name(node, part) not in self._store:
                    yield part, node.blocks[part]
        if group == 0 and node.state is not None and node.ends_prompt:
            if self._name(node, self._state) not in self._store:
                yield self._state, node.state

    def _keep(self, entries: Sequence[tuple[Node, Cell]]) -> None:
        now, began = time.time_ns(), time.perf_counter()
        try:
            blobs = self._parts.read([cell for _, cell in entries])
        except (MemoryError, OutOfDeviceMemory) as error:
            if not self._is_reported:
                self._is_reported = True
                env.log(
                    0, f"blocks of the KV cache are dropped, for lack of memory ({error}); lower --cache-ram"
                )
            return
        for (node, (part, _)), data in zip(entries, blobs, strict=True):
            # Later blocks are useless without earlier blocks, so they are removed first.
            self._store.put(self._name(node, part), data, now - 1000 * node.depth)
        self._n_kept += len({node for node, _ in entries})
        self._keep_s += time.perf_counter() - began

    def keep_all(self, is_over: Callable[[], bool]) -> bool:
        """Store all blocks in files, so that they survive this process. Stop when `is_over` returns true.
        Return whether blocks are left. Without files, do nothing."""
        if self._store.files is None or self._kept_at == self._cache.n_made:
            return False
        if not self._store.files.has_room(BATCH_NBYTES):
            self._store.files.flush(ROOM_S)
            return True
        n_made = self._cache.n_made
        entries: list[tuple[Node, Cell]] = []
        nbytes = 0
        for node in self._cache.tree.nodes():
            for cell in self._missing(node):
                entries.append((node, cell))
                nbytes += self._parts.nbytes[cell[0]]
            if nbytes >= BATCH_NBYTES:
                self._keep(entries)
                entries, nbytes = [], 0
                if is_over() or not self._store.files.has_room(BATCH_NBYTES):
                    return True
        if entries:
            self._keep(entries)
        self._kept_at = n_made
        return False

    def close(self, keeps: bool) -> None:
        """If `keeps`, store the blocks that are on the devices. Write files for a limited time."""
        deadline = time.monotonic() + CLOSE_S

        def is_over() -> bool:
            return time.monotonic() > deadline

        try:
            while keeps and self.keep_all(is_over) and not is_over():
                pass
        finally:
            self._store.close(max(1.0, deadline - time.monotonic()))

    def _name(self, node: Node, part: int) -> str:
        return f"{node_digest(node, self._parts.identity).hex()}.{part}"


def tier_of(runner: Served, cache: PrefixCache) -> HostTier | None:
    """Return the tier that a model's options ask for, or None. Raises InvalidArgument for an unusable
    folder."""
    options = runner.options
    if not options.prefix_cache or not (options.cache_ram or options.cache_disk) or runner.encodes:
        return None
    parts = runner.block_parts()
    files = None
    if options.cache_disk:
        files = BlockFiles(options.cache_disk, parts.identity, options.cache_disk_mib << 20)
    ram_nbytes = None if options.cache_ram < 0 else options.cache_ram << 20
    return HostTier(parts, BlockStore(ram_nbytes, files), cache, runner.states)
