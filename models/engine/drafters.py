"""Builds the drafter that the options name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vkbackend.models.drafting.drafter import Drafter
from vkbackend.models.drafting.heads import HeadDrafter
from vkbackend.models.drafting.in_turn import InTurn
from vkbackend.models.drafting.ngram import Ngrams

if TYPE_CHECKING:
    from vkbackend.models.engine.runner import Runner


def drafter_of(runner: Runner) -> Drafter | None:
    options, drafters = runner.options, list[Drafter]()
    for name in options.speculation:
        if name == "ngram":
            drafters.append(Ngrams(options.n_slots, options.n_ctx))
        elif name == "mtp":
            drafters.append(HeadDrafter(runner, options.draft_p_min))
    return InTurn(drafters) if len(drafters) > 1 else drafters[0] if drafters else None
