"""Marks objects that a forked child must not use: threads, driver state and pipes stay with the parent. In
the child they raise ForkedProcess instead of hanging or crashing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet

from vkbackend.errors import ForkedProcess


class Owned(Protocol):
    """An object that belongs to the process that made it."""

    def disown(self) -> None:
        """Called in a forked child: later calls raise `refusal`, and closing does nothing."""


_owned: WeakSet[Any] = WeakSet()


def own(thing: Owned) -> None:
    """Call `thing.disown()` in every forked child while `thing` lives."""
    _owned.add(thing)


def forget(clear: Callable[[], object]) -> None:
    """Call `clear` in every forked child: for caches of per-process objects."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=clear)


def refusal(subject: str) -> ForkedProcess:
    """The error for the use of `subject` in a forked child. `subject` begins the sentence."""
    return ForkedProcess(
        f"{subject} was in use when this process was forked, and its threads and the state of its drivers "
        "stay with the parent; open the model after the fork, in the child alone, or start processes with "
        "multiprocessing.get_context('spawn')"
    )


def _in_child() -> None:
    for thing in list(_owned):
        thing.disown()


forget(_in_child)
