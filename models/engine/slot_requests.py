from __future__ import annotations

from typing import TYPE_CHECKING

from vkbackend.errors import InvalidArgument
from vkbackend.models.engine.cache.blocks import SlotContent
from vkbackend.models.engine.cache.prefix_cache import PrefixCache
from vkbackend.models.engine.messages import CopySlot, EraseSlot, LoadState, SaveState, check_slot
from vkbackend.models.engine.runner import saved_state
from vkbackend.models.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from vkbackend.models.engine.runner.runner import Runner


class SlotRequests:
    def __init__(self, runner: Runner, cache: PrefixCache, scheduler: Scheduler) -> None:
        self._runner, self._cache, self._scheduler = runner, cache, scheduler

    def run(self, request: SaveState | LoadState | CopySlot | EraseSlot) -> tuple[int, ...]:
        """Return the slot's tokens. Raises InvalidArgument, StateError and the errors of devices."""
        check_slot(request.slot, self._runner.n_slots)
        content = self._scheduler.content(request.slot)
        if isinstance(request, SaveState):
            saved_state.save(self._runner, request.path, request.slot, content, request.first, request.last)
            return tuple(content.tokens)
        if isinstance(request, CopySlot):
            self._check_free(request.target)
            if request.target != request.slot:
                self._copy(request.slot, content, request.target)
            return tuple(content.tokens)
        self._check_free(request.slot)
        if isinstance(request, EraseSlot):
            self._cache.drop(request.slot)
            self._scheduler.put(request.slot, SlotContent())
            return tuple(content.tokens)
        self._load(request, content)
        return tuple(content.tokens)

    def _copy(self, source: int, content: SlotContent, target: int) -> None:
        # The target's old content is lost even if a device fails.
        self._scheduler.put(target, SlotContent())
        copies = self._cache.copy(source, target)
        if copies is None:
            raise InvalidArgument(
                f"slot {source} cannot be copied: no blocks of the KV cache are left; wait for a request to "
                "end, or open the model with more cells (kv_cells)"
            )
        self._runner.copy_blocks(copies)
        self._runner.copy_state(source, target, content.n_stored)
        resumable = content.n_stored if self._runner.states else self._cache.resumable(target)
        self._scheduler.put(
            target, SlotContent(list(content.tokens), content.n_stored, resumable, content.mark)
        )

    def _load(self, request: LoadState, content: SlotContent) -> None:
        slot, cache = request.slot, self._cache

        def place(first: int, last: int) -> dict[int, int]:
            copies = cache.cut(slot, first)
            room = None if copies is None else cache.place(slot, last)
            if room is None:
                self._scheduler.put(slot, SlotContent())
                raise InvalidArgument(
                    f"slot {slot} cannot take {last} positions: no blocks of the KV cache are left; wait for "
                    "a request to end, or open the model with more cells (kv_cells)"
                )
            self._runner.copy_blocks(copies or [])
            return room

        try:
            saved_state.load(self._runner, request.path, slot, content, place)
        finally:  # A device may fail during the load.
            self._scheduler.put(slot, content)
        cache.stored(slot, content.tokens, content.n_stored, content.mark)
        content.resumable = max(content.resumable, cache.resumable(slot))

    def _check_free(self, slot: int) -> None:
        check_slot(slot, self._runner.n_slots)
        if slot not in self._scheduler.free or self._scheduler.waiting.waits_for(slot):
            raise InvalidArgument(
                f"slot {slot} is busy; close the stream that runs there, or use another slot"
            )
