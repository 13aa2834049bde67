"""Makes objects raise ForkedProcess in a forked child, because the objects' threads, driver state and pipes
belong to the parent."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakSet

from vkbackend.errors import ForkedProcess
from vkbackend.system.forking import in_every_child


class Owned(Protocol):
    def disown(self) -> None:
        """In a forked child, make `close` do nothing and other methods raise `refusal`."""


_owned: WeakSet[Any] = WeakSet()


def own(thing: Owned) -> None:
    """Call `thing.disown()` in every child that is forked while `thing` exists."""
    _owned.add(thing)


def forget(clear: Callable[[], object]) -> None:
    """Call `clear` in every forked child, to empty a cache."""
    in_every_child(clear)


def refusal(subject: str) -> ForkedProcess:
    return ForkedProcess(
        f"{subject} was in use when this process was forked, and its threads and the state of its drivers "
        "stay with the parent; open the model after the fork, in the child alone, or start processes with "
        "multiprocessing.get_context('spawn')"
    )


def exit_before_drivers() -> None:
    """Make this forked child end before the exit handlers of drivers run. Otherwise, with NVIDIA's driver
    (580), the child crashed and the parent's model gave wrong results."""
    with suppress(AttributeError, OSError):  # only glibc has on_exit, whose handlers get the exit code
        libc = ctypes.CDLL(None)
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
        # The last handler runs first.
        libc.__cxa_atexit(ctypes.cast(libc.fflush, ctypes.c_void_p), None, None)


def _in_child() -> None:
    for thing in list(_owned):
        thing.disown()


forget(_in_child)
