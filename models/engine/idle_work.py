"""Works ahead while no request runs: stores blocks in files, records likely steps, and saves use counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from vkbackend import env
from vkbackend.errors import VkbackendError
from vkbackend.models.engine.cache.host_tier import HostTier


class Recording(Protocol):
    """The methods of a runner that work ahead."""

    def record_ahead(self, is_awaited: Callable[[], bool]) -> bool: ...

    def save_due_s(self) -> float | None: ...

    def save_counts(self) -> None: ...


class IdleWork:
    """`is_broken` returns whether the engine has an error. Such an engine does nothing more."""

    def __init__(self, runner: Recording, tier: HostTier | None, is_broken: Callable[[], bool]) -> None:
        self._runner, self._tier, self._is_broken = runner, tier, is_broken

    def advance(self, is_awaited: Callable[[], bool]) -> bool:
        """Store blocks in files, then record one step that is likely next, until `is_awaited` returns true.
        Return whether more is left to do."""
        if self._is_broken():
            return False
        try:
            if self._tier and self._tier.keep_all(is_awaited):
                return True
        except VkbackendError as error:
            env.log(1, f"blocks are not stored while idle: {error}")
            return False
        if not env.records_ahead():
            return False
        try:
            return self._runner.record_ahead(is_awaited)
        except VkbackendError as error:  # A request that needs the step gets the error.
            env.log(1, f"no step is recorded ahead: {error}")
            return False

    def save_due_s(self) -> float | None:
        """Return after how many idle seconds `save` should be called, or None."""
        return None if self._is_broken() else self._runner.save_due_s()

    def save(self) -> None:
        """Store the use counts for the next start, so that a process that is killed later does not lose
        them."""
        self._runner.save_counts()
