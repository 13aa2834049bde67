"""Which slot has which blocks of cells: sequences share the full blocks of a common beginning.

Full blocks hang in a radix tree over their tokens, one node a block. A node counts the slots that use it. An
unused node stays until its block is needed; the least recently used goes first. The cells after a slot's last
full block belong to that slot alone. Layers of one window have blocks of their own in every node, and a slot
gives back those that its window has left. Host only: `write` brings an entry of a cell table to the
devices.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from vkbackend.models.engine.blocks import Copy, Held, Node, Pool, States, Usage
from vkbackend.ops import CELL_BLOCK

Write = Callable[[int, int, int, int], None]  # group, slot, index of the block in the slot, block


class PrefixCache:
    """`pools`: one pool of blocks per group of layers. The first pool is of the layers that see all
    positions; a model may have none of these. Without `share`, slots share no blocks."""

    def __init__(
        self,
        pools: Sequence[Pool],
        n_slots: int,
        write: Write,
        states: States | None = None,
        *,
        share: bool = True,
    ) -> None:
        self.pools, self._write, self._states, self._share = list(pools), write, states, share
        n = len(self.pools)
        self._free = [list(range(pool.n_blocks - 1, -1, -1)) for pool in self.pools]
        self._unused: list[OrderedDict[Node, None]] = [OrderedDict() for _ in range(n)]
        self._with_state: OrderedDict[Node, None] = OrderedDict()
        self._root = Node(None, (), [])
        self._slots = [self._empty() for _ in range(n_slots)]
        self._idle: OrderedDict[int, None] = OrderedDict((slot, None) for slot in range(n_slots))
        self.prompt_tokens = self.shared_tokens = 0

    def _empty(self) -> Held:
        n = len(self.pools)
        return Held([], [{} for _ in range(n)], [0] * n, [0] * n)

    # ---- what is there ----

    def match(self, tokens: Sequence[int]) -> list[Node]:
        """The longest beginning of `tokens`, the last one excluded, from which a sequence can go on."""
        path: list[Node] = []
        node = self._root
        for begin in range(0, len(tokens) - CELL_BLOCK, CELL_BLOCK):
            found = node.children.get(tuple(tokens[begin : begin + CELL_BLOCK]))
            if found is None:
                break
            node = found
            path.append(node)
        while path and not self._resumes(path):
            path.pop()
        return path

    def _resumes(self, path: list[Node]) -> bool:
        if self._states and path[-1].state is None:
            return False
        for group, pool in enumerate(self.pools):
            if pool.window and any(node.blocks[group] < 0 for node in path[-pool.seen :] if pool.seen):
                return False
        return True

    def holds(self, slot: int) -> bool:
        """Whether the slot still holds anything: what is idle may be taken from it."""
        return self._slots[slot].high[0] > 0

    def begins_with(self, slot: int, path: list[Node]) -> bool:
        """Whether the slot's blocks begin with those of the path."""
        nodes, n = self._slots[slot].nodes, len(path)
        return not n or (len(nodes) >= n and nodes[n - 1] is path[-1])

    def idle(self) -> list[int]:
        """Slots without a sequence, those that hold nothing first, then the one that was released first."""
        return sorted(self._idle, key=lambda slot: (self.holds(slot), 0 if self.holds(slot) else slot))

    def resumable(self, slot: int) -> int:
        """The first position at which a sequence in the slot can go on: what a row there sees is held."""
        low = self._slots[slot].low
        windows = [low[g] * CELL_BLOCK + p.window - 1 for g, p in enumerate(self.pools) if low[g]]
        return max(windows, default=0)

    def usage(self) -> Usage:
        shared = {node for slot in self._slots for node in slot.nodes if node.users[0] > 1}
        n, free, unused = self.pools[0].n_blocks, len(self._free[0]), len(self._unused[0])
        return Usage(n, free, unused, len(shared), self.prompt_tokens, self.shared_tokens)

    # ---- a slot's life ----

    def begin(self, slot: int, path: list[Node]) -> None:
        """The slot holds the path's blocks and nothing else."""
        self.drop(slot)
        self._idle.pop(slot, None)
        held = self._slots[slot]
        self._enter(slot, held, path)
        if self._states and path:
            held.lent = path[-1]
            assert path[-1].state is not None
            self._with_state.move_to_end(path[-1])
            self._states.lend(slot, CELL_BLOCK * len(path), path[-1].state)

    def claim(self, slot: int) -> None:
        """A sequence goes on with what the slot holds."""
        self._idle.pop(slot, None)

    def _enter(self, slot: int, held: Held, path: Sequence[Node]) -> None:
        """Append nodes to those that the slot has. The caller has freed the slot's own blocks at these
        places."""
        first, end = len(held.nodes), len(held.nodes) + len(path)
        for group, pool in enumerate(self.pools):
            low = max(0, end * CELL_BLOCK - pool.window + 1) // CELL_BLOCK if pool.window else 0
            self._leave(held, group, low)
            for index, node in enumerate(path, first):
                if index >= held.low[group] and node.blocks[group] >= 0:
                    self._use(node, group)
                    self._write(group, slot, index, node.blocks[group])
            held.high[group] = max(held.high[group], end)
        held.nodes += path

    def _use(self, node: Node, group: int) -> None:
        if not node.users[group]:
            self._unused[group].pop(node, None)
        node.users[group] += 1

    def _unuse(self, node: Node, group: int) -> None:
        node.users[group] -= 1
        if not node.users[group]:
            self._unused[group][node] = None

    def reserve(self, slot: int, end: int, group: int | None = None) -> bool:
        """Blocks for the slot's positions up to `end`, in all groups or in one; False where there are none
        left, and what was found stays the slot's."""
        held, want = self._slots[slot], -(-end // CELL_BLOCK)
        for g in range(len(self.pools)) if group is None else (group,):
            while held.high[g] < want:
                block = self._block(g, slot)
                if block < 0:
                    return False
                index = held.high[g]
                held.own[g][index] = block
                held.high[g] += 1
                self._write(g, slot, index, block)
        return True

    def _block(self, group: int, slot: int) -> int:
        """A block for a slot, -1 for none: a free one, or what was not used for the longest time."""
        while not self._free[group]:
            if self._unused[group]:
                self._evict(group)
            elif (oldest := next((s for s in self._idle if s != slot and self._slots[s].high[0]), -1)) >= 0:
                self.drop(oldest)
            else:
                return -1
        return self._free[group].pop()

    def _evict(self, group: int) -> None:
        node, _ = self._unused[group].popitem(last=False)
        if group:
            self._free[group].append(node.blocks[group])
            node.blocks[group] = -1
            return
        # Children were used no later than their parent, so this one has none any more.
        assert not node.children and node.parent is not None
        del node.parent.children[node.key]
        for g, block in enumerate(node.blocks):
            if block >= 0:
                self._free[g].append(block)
                self._unused[g].pop(node, None)
        self._forget_state(node)

    def stored(self, slot: int, tokens: Sequence[int], n_stored: int) -> None:
        """A step has stored the slot's positions up to `n_stored`, which are those of `tokens`: full blocks
        become nodes, and windows move on."""
        held = self._slots[slot]
        held.lent = None
        while self._share and (len(held.nodes) + 1) * CELL_BLOCK <= n_stored:
            self._file(slot, held, tokens)
        for group, pool in enumerate(self.pools):
            if pool.window:
                self._leave(held, group, max(0, n_stored - pool.window + 1) // CELL_BLOCK)

    def _file(self, slot: int, held: Held, tokens: Sequence[int]) -> None:
        """Turn the slot's first block behind its nodes into a node. If the tree has a node with these tokens,
        the slot uses its block and frees its own."""
        index = len(held.nodes)
        parent = held.nodes[-1] if held.nodes else self._root
        key = tuple(tokens[index * CELL_BLOCK : (index + 1) * CELL_BLOCK])
        blocks = [own.pop(index, -1) for own in held.own]
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(parent, key, blocks)
        for group, block in enumerate(blocks):
            known = node.blocks[group]
            if block >= 0 and known >= 0 and known != block:
                self._free[group].append(block)
                self._write(group, slot, index, known)
            elif block >= 0:
                node.blocks[group] = block
            if group == 0 or (block >= 0 and index >= held.low[group]):
                self._use(node, group)
        held.nodes.append(node)

    def _leave(self, held: Held, group: int, low: int) -> None:
        """Give back the blocks in front of `low`."""
        for index in range(held.low[group], min(low, held.high[group])):
            if index < len(held.nodes):
                if held.nodes[index].blocks[group] >= 0:
                    self._unuse(held.nodes[index], group)
            elif (block := held.own[group].pop(index, -1)) >= 0:
                self._free[group].append(block)
        held.low[group] = max(held.low[group], low)
        held.high[group] = max(held.high[group], low)

    def extend(self, slot: int, tokens: Sequence[int], n_stored: int) -> int:
        """Take what others have computed of the slot's next tokens meanwhile; returns the new `n_stored`."""
        held = self._slots[slot]
        if not self._share or n_stored != CELL_BLOCK * len(held.nodes):
            return n_stored
        path: list[Node] = []
        node = held.nodes[-1] if held.nodes else self._root
        for begin in range(n_stored, len(tokens) - CELL_BLOCK, CELL_BLOCK):
            found = node.children.get(tuple(tokens[begin : begin + CELL_BLOCK]))
            if found is None or any(block < 0 for block in found.blocks):
                break
            node = found
            path.append(node)
        while path and self._states and path[-1].state is None:
            path.pop()
        if not path:
            return n_stored
        for group, own in enumerate(held.own):
            for index in range(len(held.nodes), len(held.nodes) + len(path)):
                if (block := own.pop(index, -1)) >= 0:
                    self._free[group].append(block)
        self._enter(slot, held, path)
        if self._states:
            held.lent = path[-1]
            assert path[-1].state is not None
            self._states.lend(slot, CELL_BLOCK * len(held.nodes), path[-1].state)
        return CELL_BLOCK * len(held.nodes)

    def next_key(self, slot: int, tokens: Sequence[int], n_stored: int) -> tuple[int, tuple[int, ...]] | None:
        """A key for the block that the slot computes next: its parent node and its tokens. Slots with equal
        keys would compute the same block. None in a block's middle, at the end of the tokens, or without
        sharing."""
        held = self._slots[slot]
        end = n_stored + CELL_BLOCK
        if not self._share or n_stored != CELL_BLOCK * len(held.nodes) or end >= len(tokens):
            return None
        return id(held.nodes[-1] if held.nodes else self._root), tuple(tokens[n_stored:end])

    def cut(self, slot: int, n: int) -> list[Copy] | None:
        """Keep the first `n` positions of a slot. A block that others see and the slot will write to gets a
        copy; None where there is no block for it, and the slot then holds nothing."""
        if n == 0:
            self.drop(slot)
            return []
        held, (full, rest) = self._slots[slot], divmod(n, CELL_BLOCK)
        copies: list[Copy] = []
        if rest and full < len(held.nodes):
            node = held.nodes[full]
            for group in range(len(self.pools)):
                if node.blocks[group] >= 0 and full >= held.low[group]:
                    block = self._block(group, slot)
                    if block < 0:
                        for copy in copies:
                            self._free[copy.group].append(copy.target)
                        self.drop(slot)
                        return None
                    copies.append(Copy(group, node.blocks[group], block))
        end = full + (rest > 0)
        for group, own in enumerate(held.own):
            for index in [i for i in own if i >= end]:
                self._free[group].append(own.pop(index))
        self._shorten(held, full)
        for group in range(len(self.pools)):
            held.high[group] = min(held.high[group], end)
        for copy in copies:
            held.own[copy.group][full] = copy.target
            held.high[copy.group] = end
            self._write(copy.group, slot, full, copy.target)
        return copies

    def _shorten(self, held: Held, n_nodes: int) -> None:
        """Give back the nodes from the `n_nodes`-th on. The deepest goes first: it then counts as unused for
        longer than its parent, and is evicted before it."""
        for index in range(len(held.nodes) - 1, n_nodes - 1, -1):
            node = held.nodes.pop()
            for group in range(len(self.pools) - 1, -1, -1):
                if group == 0 or (index >= held.low[group] and node.blocks[group] >= 0):
                    self._unuse(node, group)
        held.lent = None

    def place(self, slot: int, last: int) -> dict[int, int] | None:
        """Blocks for positions up to `last` whose K and V are written from outside. A layer group with a
        window gets only the blocks that a sequence at `last` still sees. Returns the first held position of
        each window size, None if no blocks are left."""
        held = self._slots[slot]
        for group, pool in enumerate(self.pools):
            if pool.window:
                self._leave(held, group, max(0, last - pool.window + 1) // CELL_BLOCK)
        if not self.reserve(slot, last):
            self.drop(slot)
            return None
        return {p.window: held.low[g] * CELL_BLOCK for g, p in enumerate(self.pools)}

    def release(self, slot: int) -> None:
        """The sequence has ended. What the slot holds stays until its blocks are needed elsewhere. If the
        sequence never ran, its recurrent state is still another's (`lent`), so nothing stays."""
        if self._slots[slot].lent:
            self.drop(slot)
        self._idle[slot] = None

    def drop(self, slot: int) -> None:
        """The slot holds nothing any more."""
        held = self._slots[slot]
        for group, own in enumerate(held.own):
            self._free[group] += own.values()
        self._shorten(held, 0)
        self._slots[slot] = self._empty()
        if self._states:
            self._states.drop(slot)

    def copy(self, source: int, target: int) -> list[Copy] | None:
        """The target holds what the source does: the same nodes, and copies of its own blocks; None where
        there are no blocks for them."""
        was_idle = source in self._idle
        self._idle.pop(source, None)  # else its own blocks might be taken for the copies
        try:
            return self._copy(source, target)
        finally:
            if was_idle:
                self._idle[source] = None

    def _copy(self, source: int, target: int) -> list[Copy] | None:
        self.drop(target)
        theirs, held, copies = self._slots[source], self._slots[target], list[Copy]()
        self._enter(target, held, theirs.nodes)
        for group, own in enumerate(theirs.own):
            self._leave(held, group, theirs.low[group])
            for index, block in own.items():
                fresh = self._block(group, target)
                if fresh < 0:
                    self.drop(target)
                    return None
                held.own[group][index] = fresh
                self._write(group, target, index, fresh)
                copies.append(Copy(group, block, fresh))
            held.high[group] = theirs.high[group]
        return copies

    # ---- recurrent states ----

    def snapshot(self, slot: int, position: int) -> None:
        """Keep the state behind the slot's first `position` positions for whoever begins so."""
        index = position // CELL_BLOCK - 1
        if not self._states or position % CELL_BLOCK or not 0 <= index < len(self._slots[slot].nodes):
            return
        node = self._slots[slot].nodes[index]
        if node.state is None and (cell := self._states.take(slot, position)) is not None:
            node.state = cell
            self._with_state[node] = None

    def spare_state(self) -> int | None:
        """The cell of the state that was not used for the longest time, which is the caller's then."""
        lent = {slot.lent for slot in self._slots}
        node = next((node for node in self._with_state if node not in lent), None)
        if node is None:
            return None
        del self._with_state[node]
        cell, node.state = node.state, None
        return cell

    def _forget_state(self, node: Node) -> None:
        if node.state is not None and self._states:
            del self._with_state[node]
            self._states.give_back(node.state)
            node.state = None
