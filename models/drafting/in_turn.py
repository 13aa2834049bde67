"""Asks several drafters in turn. The first one that drafts for a sequence wins."""

from __future__ import annotations

from collections.abc import Sequence

from vkbackend.models.drafting.drafter import NO_DRAFT, Draft, Drafter, Want


class InTurn:
    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters
        self._last: dict[int, Drafter] = {}  # by slot

    @property
    def stores(self) -> bool:
        return any(drafter.stores for drafter in self._drafters)

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(wants)
        for drafter in self._drafters:
            if missing := [i for i, draft in enumerate(drafts) if not draft.tokens]:
                for i, draft in zip(missing, drafter.draft([wants[i] for i in missing]), strict=True):
                    drafts[i], self._last[wants[i].slot] = draft, drafter
        return drafts

    def took(self, slot: int, n_accepted: int) -> None:
        self._last[slot].took(slot, n_accepted)

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()
