"""Tracks which cache blocks each slot uses. Sequences share the full blocks of a common prefix.

Full blocks are nodes of a radix tree. `mark` records the adapters of a sequence's positions; blocks are
shared only between positions with equal adapters. Cells after a slot's last full block belong to that slot
alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from vkbackend.models.engine.cache.blocks import Copy, Pool, Usage
from vkbackend.models.engine.cache.layer_blocks import LayerBlocks, Span, Write
from vkbackend.models.engine.cache.mark import Mark
from vkbackend.models.engine.cache.prefix_tree import Key, Node, PrefixTree, key_of
from vkbackend.models.engine.cache.snapshots import Snapshots, States
from vkbackend.ops import CELL_BLOCK

# Called before a group's block of a node is evicted. Without group 0's block, the whole node is evicted.
Leaving = Callable[[Node, LayerBlocks], None]


class PrefixCache:
    """`pools` holds a pool of blocks per layer group. The first group attends to all positions, and may have
    no layers. If `share` is False, slots share no blocks."""

    def __init__(
        self,
        pools: Sequence[Pool],
        n_slots: int,
        write: Write,
        states: States | None = None,
        *,
        share: bool = True,
    ) -> None:
        self.groups = [LayerBlocks(group, pool, n_slots, write) for group, pool in enumerate(pools)]
        self.tree, self.snapshots, self._share = PrefixTree(len(pools)), Snapshots(states), share
        # for each slot, the nodes of its leading full blocks
        self.nodes: list[list[Node]] = [[] for _ in range(n_slots)]
        self._idle: OrderedDict[int, None] = OrderedDict((slot, None) for slot in range(n_slots))
        self.prompt_tokens = self.shared_tokens = 0
        self.n_made = 0  # nodes so far
        self.leaving: Leaving = lambda node, group: None
        # slots whose cells after the nodes were shifted; shifted blocks never become nodes
        self._shifted: set[int] = set()

    def match(self, tokens: Sequence[int], mark: Mark = ()) -> list[Node]:
        """Return the longest cached prefix, without the last token, from which a sequence can continue."""
        path = list(self.tree.follow(self.tree.root, tokens, 0, mark))
        while path and not (
            self.snapshots.resumes(path[-1]) and all([group.sees(path) for group in self.groups])
        ):
            path.pop()
        return path

    def holds(self, slot: int) -> bool:
        """Return whether the slot has blocks. Blocks of idle slots can be evicted."""
        return self.groups[0].spans[slot].high > 0

    def begins_with(self, slot: int, path: list[Node]) -> bool:
        nodes, n = self.nodes[slot], len(path)
        return not n or (len(nodes) >= n and nodes[n - 1] is path[-1])

    def idle(self) -> list[int]:
        """Return slots without a sequence, empty slots first, then by time of release."""
        return sorted(self._idle, key=lambda slot: (self.holds(slot), 0 if self.holds(slot) else slot))

    def resumable(self, slot: int) -> int:
        lows = [(group.spans[slot].low, group.pool.window) for group in self.groups]
        return max([low * CELL_BLOCK + window - 1 for low, window in lows if low], default=0)

    def next_key(
        self, slot: int, tokens: Sequence[int], n_stored: int, mark: Mark = ()
    ) -> tuple[int, Key] | None:
        """Return the parent node and the tokens of the slot's next block. Slots with equal keys would compute
        the same block. Return None if `n_stored` is inside a block or at the end of the tokens, or if slots
        share no blocks."""
        end = n_stored + CELL_BLOCK
        if not self._share or n_stored != CELL_BLOCK * len(self.nodes[slot]) or end >= len(tokens):
            return None
        return id(self.last(slot)), key_of(tokens, n_stored, mark)

    def usage(self) -> Usage:
        shared = {node for nodes in self.nodes for node in nodes if node.users[0] > 1}
        first = self.groups[0]
        counts = first.pool.n_blocks, len(first.free), len(first.unused), len(shared)
        return Usage(*counts, self.prompt_tokens, self.shared_tokens)

    def last(self, slot: int) -> Node:
        return self.nodes[slot][-1] if self.nodes[slot] else self.tree.root

    def begin(self, slot: int, path: list[Node]) -> None:
        self.drop(slot)
        self._idle.pop(slot, None)
        self._enter(slot, path)
        if path:
            self.snapshots.lend(slot, CELL_BLOCK * len(path), path[-1])

    def claim(self, slot: int) -> None:
        self._idle.pop(slot, None)

    def extend(self, slot: int, tokens: Sequence[int], n_stored: int, mark: Mark = ()) -> int:
        """Make the slot use blocks that other slots have computed. Return the new `n_stored`."""
        nodes = self.nodes[slot]
        if not self._share or n_stored != CELL_BLOCK * len(nodes):
            return n_stored
        path: list[Node] = []
        for node in self.tree.follow(self.last(slot), tokens, n_stored, mark):
            if any(block < 0 for block in node.blocks):
                break
            path.append(node)
        while path and not self.snapshots.resumes(path[-1]):
            path.pop()
        if not path:
            return n_stored
        self._enter(slot, path)
        self.snapshots.lend(slot, CELL_BLOCK * len(nodes), path[-1])
        return CELL_BLOCK * len(nodes)

    def _enter(self, slot: int, path: Sequence[Node]) -> None:
        for group in self.groups:
            group.enter(slot, self.nodes[slot], path)
        self.nodes[slot] += path

    def reserve(self, slot: int, end: int, group: int | None = None) -> bool:
        """Allocate blocks for positions up to `end`, in all layer groups or in `group`. Return False if no
        blocks are left; blocks that were allocated before that stay allocated."""
        want = -(-end // CELL_BLOCK)
        for blocks in self.groups if group is None else (self.groups[group],):
            while (index := blocks.spans[slot].high) < want:
                if (block := self._block(blocks, slot)) < 0:
                    return False
                blocks.put(slot, index, block)
        return True

    def _block(self, group: LayerBlocks, slot: int) -> int:
        while not group.free:
            if group.unused:
                self._evict(group)
            elif (oldest := next((s for s in self._idle if s != slot and self.holds(s)), -1)) >= 0:
                self.drop(oldest)
            else:
                return -1
        return group.free.pop()

    def _evict(self, group: LayerBlocks) -> None:
        node = next(iter(group.unused))
        self.leaving(node, group)
        if group.group:
            group.evict(node)
            return
        # Children are evicted before their parent, so this node has no children.
        self.tree.remove(node)
        for blocks in self.groups:
            blocks.evict(node)
        self.snapshots.forget(node)

    def stored(self, slot: int, tokens: Sequence[int], n_stored: int, mark: Mark = ()) -> None:
        """Turn the slot's full blocks into nodes, and release blocks outside the windows."""
        nodes = self.nodes[slot]
        self.snapshots.lent.pop(slot, None)
        is_shared = self._share and slot not in self._shifted
        while is_shared and (end := (len(nodes) + 1) * CELL_BLOCK) <= n_stored:
            node = self.tree.child(self.last(slot), key_of(tokens, end - CELL_BLOCK, mark))
            for group in self.groups:
                group.share(slot, len(nodes), node)
            nodes.append(node)
            self.n_made += 1
        for group in self.groups:
            group.move_window(slot, nodes, n_stored)

    def snapshot(self, slot: int, position: int, ends_prompt: bool = False) -> None:
        index = position // CELL_BLOCK - 1
        if position % CELL_BLOCK == 0 and 0 <= index < len(self.nodes[slot]):
            node = self.nodes[slot][index]
            self.snapshots.keep(slot, position, node)
            node.ends_prompt |= ends_prompt

    def own_block(self, slot: int, group: int, index: int) -> int:
        return self.groups[group].spans[slot].blocks[index]

    def cut(self, slot: int, n: int) -> list[Copy] | None:
        """Truncate the slot to its first `n` positions. If position `n` is in a node's block, the slot needs
        a copy of that block. Return the copies to make. If no block is left, empty the slot and return None.
        """
        if n == 0:
            self.drop(slot)
            return []
        self._shifted.discard(slot)
        full, rest = divmod(n, CELL_BLOCK)
        copies: list[Copy] = []
        if rest and full < len(self.nodes[slot]):
            node = self.nodes[slot][full]
            for group in self.groups:
                if group.block(node) >= 0 and full >= group.spans[slot].low:
                    if (block := self._block(group, slot)) < 0:
                        for copy in copies:
                            self.groups[copy.group].free.append(copy.target)
                        self.drop(slot)
                        return None
                    copies.append(Copy(group.group, group.block(node), block))
        end = full + (rest > 0)
        for group in self.groups:
            group.free_own(slot, end)
        self._shorten(slot, full)
        for group in self.groups:
            group.spans[slot].high = min(group.spans[slot].high, end)
        for copy in copies:
            self.groups[copy.group].put(slot, full, copy.target)
        return copies

    def unshare(self, slot: int, first: int, used: int, copies: list[Copy]) -> bool:
        """From position `first` on, replace shared blocks by copies that only this slot uses, because a
        context shift overwrites them.

        The copies are added to `copies`. Blocks with only discarded positions (`first` to `used` - 1) are not
        copied. Return False if no blocks are left; a later call continues.
        """
        [group] = self.groups  # contexts with windows are not shifted
        nodes = self.nodes[slot]
        self._shifted.add(slot)
        while len(nodes) > first // CELL_BLOCK:
            node, index = nodes[-1], len(nodes) - 1
            fresh = self._block(group, slot) if node.users[0] > 1 else -1
            if node.users[0] == 1:  # evicting a block for the copy may have removed the other users
                if fresh >= 0:
                    group.free.append(fresh)
                group.take(slot, index, node)
                self._forget(node)
            elif fresh < 0:
                return False
            else:
                if index * CELL_BLOCK < first or (index + 1) * CELL_BLOCK > used:
                    copies.append(Copy(0, group.block(node), fresh))
                group.replace(slot, index, node, fresh)
            nodes.pop()
        return True

    def _forget(self, node: Node) -> None:
        """Remove a node without users and the nodes below it from the tree."""
        for child in list(node.children.values()):
            self._forget(child)
        self.tree.remove(node)
        for blocks in self.groups:
            blocks.evict(node)

    def end_shift(self, slot: int, n_stored: int) -> None:
        """Free the slot's blocks after the first `n_stored` positions."""
        end = -(-n_stored // CELL_BLOCK)
        for group in self.groups:
            group.free_own(slot, end)
            group.spans[slot].high = min(group.spans[slot].high, end)

    def place(self, slot: int, last: int) -> dict[int, int] | None:
        """Allocate blocks for positions up to `last`, to load them. Layers with a window get only blocks to
        which position `last` attends. Return {window: first position with a block}, or None if no blocks are
        left."""
        for group in self.groups:
            group.move_window(slot, self.nodes[slot], last)
        if not self.reserve(slot, last):
            self.drop(slot)
            return None
        return {group.pool.window: group.spans[slot].low * CELL_BLOCK for group in self.groups}

    def copy(self, source: int, target: int) -> list[Copy] | None:
        """Share the source's nodes, and allocate copies of the source's own blocks. Return the copies to
        make, or None if no block is free."""
        was_idle = source in self._idle
        self._idle.pop(source, None)  # The copies must not evict the source's blocks.
        try:
            return self._copy(source, target)
        finally:
            if was_idle:
                self._idle[source] = None

    def _copy(self, source: int, target: int) -> list[Copy] | None:
        self.drop(target)
        copies: list[Copy] = []
        self._enter(target, self.nodes[source])
        for group in self.groups:
            span = group.spans[source]
            group.skip(target, self.nodes[target], span.low)
            for index, block in span.blocks.items():
                fresh = self._block(group, target)
                if fresh < 0:
                    self.drop(target)
                    return None
                group.put(target, index, fresh)
                copies.append(Copy(group.group, block, fresh))
            group.spans[target].high = span.high
        return copies

    def release(self, slot: int) -> None:
        """The slot keeps its blocks until other slots need them. If the sequence never ran, the recurrent
        state still belongs to a node, so the slot is emptied."""
        if slot in self.snapshots.lent:
            self.drop(slot)
        self._idle[slot] = None

    def drop(self, slot: int) -> None:
        for group in self.groups:
            group.free_own(slot, 0)
        self._shifted.discard(slot)
        self._shorten(slot, 0)
        for group in self.groups:
            group.spans[slot] = Span()
        self.snapshots.drop(slot)

    def _shorten(self, slot: int, n_nodes: int) -> None:
        """Release nodes from index `n_nodes` on, the deepest first, so that children are evicted before their
        parent."""
        nodes = self.nodes[slot]
        for index in range(len(nodes) - 1, n_nodes - 1, -1):
            node = nodes.pop()
            for group in self.groups:
                group.leave(slot, index, node)
        self.snapshots.lent.pop(slot, None)
