"""Recurrent states that nodes of the prefix tree own. A node holds the state after its last token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from vkbackend.models.engine.cache.prefix_tree import Node


class States(Protocol):
    """Implemented by placement/recurrent_state.py."""

    def take(self, slot: int, position: int) -> int | None:
        """Return the cell with the slot's snapshot at `position`, or None. The caller then owns the cell."""

    def lend(self, slot: int, position: int, cell: int) -> None:
        """Make the slot's next run begin at `position` and read its state from `cell`."""

    def give_back(self, cell: int) -> None:
        """Free the cell."""

    def drop(self, slot: int) -> None:
        """Forget the slot's states."""


class Snapshots:
    """`states` is None without recurrent layers. `lent` maps a slot to the node whose state the slot's next
    run reads."""

    def __init__(self, states: States | None) -> None:
        self._states = states
        self.leaving: Callable[[Node], None] = lambda node: None  # Called before a node loses its state.
        self._nodes: OrderedDict[Node, None] = OrderedDict()  # least recently used first
        self.lent: dict[int, Node] = {}

    def resumes(self, node: Node) -> bool:
        return self._states is None or node.state is not None

    def keep(self, slot: int, position: int, node: Node) -> None:
        """Move the slot's snapshot at `position` to the node."""
        if self._states and node.state is None and (cell := self._states.take(slot, position)) is not None:
            node.state = cell
            self._nodes[node] = None

    def lend(self, slot: int, position: int, node: Node) -> None:
        """Make the slot's next run begin at `position` with the node's state."""
        if self._states:
            assert node.state is not None
            self.lent[slot] = node
            self._nodes.move_to_end(node)
            self._states.lend(slot, position, node.state)

    def drop(self, slot: int) -> None:
        if self._states:
            self._states.drop(slot)

    def spare(self) -> int | None:
        """Take the least recently used state from its node. Return the state's cell, or None if slots will
        read all states."""
        lent = set(self.lent.values())
        node = next((node for node in self._nodes if node not in lent), None)
        if node is None:
            return None
        self.leaving(node)
        del self._nodes[node]
        cell, node.state = node.state, None
        return cell

    def forget(self, node: Node) -> None:
        if node.state is not None and self._states:
            del self._nodes[node]
            self._states.give_back(node.state)
            node.state = None
