"""The radix tree of the prefix cache, with a node per full block of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vkbackend.models.engine.cache.mark import BlockMark, Mark, block_mark
from vkbackend.ops import CELL_BLOCK

Key = tuple[BlockMark | int, ...]  # CELL_BLOCK tokens, after the block's adapters if it has any


def key_of(tokens: Sequence[int], begin: int, mark: Mark = ()) -> Key:
    end = begin + CELL_BLOCK
    if mark and (adapters := block_mark(mark, begin, end)):
        return (adapters, *tokens[begin:end])
    return tuple(tokens[begin:end])


class Node:
    """For each layer group, `blocks` holds the cache block with K and V, or -1 if it was evicted. `users`
    counts the slots that use the block. `state` is the cell that holds the recurrent state after the node.
    `ends_prompt` says whether the state is likely to be needed again: a prompt's last full block ends there.
    """

    __slots__ = ("blocks", "children", "depth", "digest", "ends_prompt", "key", "parent", "state", "users")

    def __init__(self, parent: Node | None, key: Key, n_groups: int) -> None:
        self.parent, self.key = parent, key
        self.depth: int = parent.depth + 1 if parent else 0
        self.blocks, self.users = [-1] * n_groups, [0] * n_groups
        self.children: dict[Key, Node] = {}
        self.state: int | None = None
        self.ends_prompt = False
        self.digest = b""  # digest of the keys from the root on, or empty if unknown


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

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes, each after its parent."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def child(self, parent: Node, key: Key) -> Node:
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(parent, key, self._n_groups)
        return node

    def remove(self, node: Node) -> None:
        assert not node.children and node.parent is not None
        del node.parent.children[node.key]


def node_digest(node: Node, root: bytes) -> bytes:
    """Return the digest of a node, which is the same in every process. `root` is the digest of the model."""
    path = []
    while node.parent is not None and not node.digest:
        path.append(node)
        node = node.parent
    digest = node.digest or root
    for later in reversed(path):
        digest = later.digest = digest_of(digest, later.key)
    return digest


def packed(tokens: Sequence[Any]) -> np.ndarray:
    """Return tokens as int32, or as int64 if some are ids of images' rows, which have 56 bits."""
    ids = np.array(tokens, "<i8")
    return ids if ids.min(initial=0) < 0 else ids.astype("<i4")


def digest_of(before: bytes, key: Key) -> bytes:
    """Return a block's digest. `before` is the digest of the block before, or of the model for a first
    block."""
    adapters, tokens = (key[0], key[1:]) if isinstance(key[0], tuple) else ((), key)
    digest = hashlib.sha256(before + repr(adapters).encode() + b"\0")
    digest.update(packed(tokens).tobytes())
    return digest.digest()
