"""The radix tree of the prefix cache, with a node per full block of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vkbackend.models.engine.cache.mark import BlockMark, Mark, block_mark
from vkbackend.ops import CELL_BLOCK

Key = tuple[BlockMark | int, ...]  # CELL_BLOCK tokens, after the block's adapters if it has any


def key_of(tokens: Sequence[int], begin: int, mark: Mark = ()) -> Key:
    """Return the key of the block that begins at position `begin`."""
    end = begin + CELL_BLOCK
    if mark and (adapters := block_mark(mark, begin, end)):
        return (adapters, *tokens[begin:end])
    return tuple(tokens[begin:end])


class Node:
    """For each layer group, `blocks` holds the cache block with K and V, or -1 if it was evicted. `users`
    counts the slots that use the block. `state` is the cell that holds the recurrent state after the node."""

    __slots__ = ("blocks", "children", "key", "parent", "state", "users")

    def __init__(self, parent: Node | None, key: Key, n_groups: int) -> None:
        self.parent, self.key = parent, key
        self.blocks, self.users = [-1] * n_groups, [0] * n_groups
        self.children: dict[Key, Node] = {}
        self.state: int | None = None


class PrefixTree:
    def __init__(self, n_groups: int) -> None:
        self._n_groups = n_groups
        self.root = Node(None, (), n_groups)

    def follow(self, node: Node, tokens: Sequence[int], begin: int, mark: Mark = ()) -> Iterator[Node]:
        """Yield the nodes below `node` that match the full blocks of `tokens[begin:-1]`."""
        for start in range(begin, len(tokens) - CELL_BLOCK, CELL_BLOCK):
            child = node.children.get(key_of(tokens, start, mark))
            if child is None:
                return
            node = child
            yield node

    def child(self, parent: Node, key: Key) -> Node:
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(parent, key, self._n_groups)
        return node

    def remove(self, node: Node) -> None:
        assert not node.children and node.parent is not None
        del node.parent.children[node.key]
