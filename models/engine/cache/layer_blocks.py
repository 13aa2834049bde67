"""Tracks the blocks of one layer group. A block is free, or belongs to a node of the prefix tree or to a
slot."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vkbackend.models.engine.cache.blocks import Pool
from vkbackend.models.engine.cache.prefix_tree import Node
from vkbackend.ops import CELL_BLOCK

# The arguments are layer group, slot, index in the slot, and block.
Write = Callable[[int, int, int, int], None]


@dataclass(slots=True)
class Span:
    """A slot's blocks, `low` to `high` - 1. The first blocks belong to nodes of the prefix tree. `blocks`
    maps the other indices to the slot's own blocks."""

    blocks: dict[int, int] = field(default_factory=dict)
    low: int = 0
    high: int = 0


class LayerBlocks:
    """`unused` lists the nodes whose block no slot uses, least recently used first. `write` sends an entry of
    the cell table to the devices."""

    def __init__(self, group: int, pool: Pool, n_slots: int, write: Write) -> None:
        self.group, self.pool, self._write = group, pool, write
        self.free = list(range(pool.n_blocks - 1, -1, -1))
        self.unused: OrderedDict[Node, None] = OrderedDict()
        self.spans = [Span() for _ in range(n_slots)]

    def block(self, node: Node) -> int:
        return node.blocks[self.group]

    def sees(self, path: Sequence[Node]) -> bool:
        """Return whether the tree holds all blocks to which the row after `path` attends."""
        seen = self.pool.seen
        return not seen or all(self.block(node) >= 0 for node in path[-seen:])

    def use(self, node: Node) -> None:
        if not node.users[self.group]:
            self.unused.pop(node, None)
        node.users[self.group] += 1

    def unuse(self, node: Node) -> None:
        node.users[self.group] -= 1
        if not node.users[self.group]:
            self.unused[node] = None

    def evict(self, node: Node) -> None:
        self.unused.pop(node, None)
        if (block := self.block(node)) >= 0:
            self.free.append(block)
            node.blocks[self.group] = -1

    def put(self, slot: int, index: int, block: int) -> None:
        span = self.spans[slot]
        span.blocks[index] = block
        span.high = index + 1
        self._write(self.group, slot, index, block)

    def enter(self, slot: int, nodes: Sequence[Node], path: Sequence[Node]) -> None:
        """Append the blocks of `path` to the blocks of the slot's nodes. Free the slot's own blocks at these
        indices."""
        span, first, end = self.spans[slot], len(nodes), len(nodes) + len(path)
        for index in range(first, end):
            if (block := span.blocks.pop(index, -1)) >= 0:
                self.free.append(block)
        self.move_window(slot, nodes, end * CELL_BLOCK)
        for index, node in enumerate(path, first):
            if index >= span.low and self.block(node) >= 0:
                self.use(node)
                self._write(self.group, slot, index, self.block(node))
        span.high = max(span.high, end)

    def share(self, slot: int, index: int, node: Node) -> None:
        """Move the slot's own block to the node. If the node already has a block, free the slot's block."""
        span = self.spans[slot]
        block, known = span.blocks.pop(index, -1), self.block(node)
        if block >= 0 and known >= 0:
            self.free.append(block)
            self._write(self.group, slot, index, known)
        elif block >= 0:
            node.blocks[self.group] = block
        if self.group == 0 or (block >= 0 and index >= span.low):
            self.use(node)

    def take(self, slot: int, index: int, node: Node) -> None:
        """Move the node's block to the slot, its only user."""
        self.spans[slot].blocks[index], node.blocks[self.group] = self.block(node), -1
        node.users[self.group] -= 1

    def replace(self, slot: int, index: int, node: Node, block: int) -> None:
        """Let the slot use its own `block` in place of the node's block."""
        self.spans[slot].blocks[index] = block
        self._write(self.group, slot, index, block)
        self.unuse(node)

    def leave(self, slot: int, index: int, node: Node) -> None:
        if self.group == 0 or (index >= self.spans[slot].low and self.block(node) >= 0):
            self.unuse(node)

    def move_window(self, slot: int, nodes: Sequence[Node], position: int) -> None:
        """Release blocks to which a row at `position` no longer attends."""
        if self.pool.window:
            self.skip(slot, nodes, max(0, position - self.pool.window + 1) // CELL_BLOCK)

    def skip(self, slot: int, nodes: Sequence[Node], low: int) -> None:
        span = self.spans[slot]
        for index in range(span.low, min(low, span.high)):
            if index < len(nodes):
                if self.block(nodes[index]) >= 0:
                    self.unuse(nodes[index])
            elif (block := span.blocks.pop(index, -1)) >= 0:
                self.free.append(block)
        span.low, span.high = max(span.low, low), max(span.high, low)

    def free_own(self, slot: int, begin: int) -> None:
        blocks = self.spans[slot].blocks
        for index in [i for i in blocks if i >= begin]:
            self.free.append(blocks.pop(index))
