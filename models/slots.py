"""The methods of `LLM` that save, load, copy and erase a slot's content."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable

from vkbackend.checks import whole_number
from vkbackend.models.arguments import path_string, slot_number
from vkbackend.models.engine.answers import Answers
from vkbackend.models.engine.messages import CopySlot, EraseSlot, LoadState, Request, SaveState
from vkbackend.models.options import MAX_CONTEXT


class Slots(ABC):
    n_slots: int

    @abstractmethod
    def _ask(self, make: Callable[[int], Request], *, eager: bool = True) -> Answers: ...

    def save_state(
        self, path: str | os.PathLike[str], slot: int = 0, *, first: int = 0, last: int | None = None
    ) -> list[int]:
        """Save a slot's tokens, K and V to a file (docs/state_format.md), and return the tokens.

        A slot keeps its last sequence until another sequence uses the slot. A slot may be saved while a
        stream runs in it. Only positions `first` to `last` - 1 are saved. A `last` of None saves all later
        positions, and also the newest token, which has not run yet. After an error the file is unchanged.
        Raises StateError, and InvalidArgument for a slot or positions out of range.
        """
        slot, path = self._slot(slot), os.path.abspath(path_string("path", path, "a file to save to"))
        first = whole_number("first", first, 0, MAX_CONTEXT)
        last = last if last is None else whole_number("last", last, 0, MAX_CONTEXT, ", or None for all")
        return self._tokens(lambda id_: SaveState(id_, path, slot, first, last))

    def load_state(self, path: str | os.PathLike[str], slot: int = 0) -> list[int]:
        """Load a saved state into a slot and return its tokens.

        `generate(tokens + more, slot=slot)` then computes only the new tokens. The model and the cache types
        must be the same as when the state was saved. Devices, split, slot and n_ctx may differ. A file saved
        with `first` continues the slot's content, which must equal the content at the save. Random numbers
        are not saved, so a seeded run draws them from the start. After StateError the slot is unchanged.
        Raises InvalidArgument while the slot is in use.
        """
        slot, path = self._slot(slot), os.path.abspath(path_string("path", path, "a saved state"))
        return self._tokens(lambda id_: LoadState(id_, path, slot))

    def copy_slot(self, source: int, target: int) -> list[int]:
        """Copy slot `source` to slot `target` on the devices and return its tokens.

        So a long prompt can be computed once and continued in several ways. Raises InvalidArgument while the
        target is in use.
        """
        source, target = self._slot(source), self._slot(target)
        return self._tokens(lambda id_: CopySlot(id_, source, target))

    def erase_slot(self, slot: int) -> list[int]:
        """Erase a slot's content and return its tokens. The slot's full blocks remain in the prefix cache.
        Raises InvalidArgument while the slot is in use."""
        slot = self._slot(slot)
        return self._tokens(lambda id_: EraseSlot(id_, slot))

    def _tokens(self, make: Callable[[int], Request]) -> list[int]:
        (event,) = self._ask(make).events()
        assert event.tokens is not None
        return list(event.tokens)

    def _slot(self, slot: int) -> int:
        return slot_number("slot", slot, self.n_slots)
