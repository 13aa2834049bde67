"""Builds the speculation that the options ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vkbackend.models.drafting.drafter import Drafter
from vkbackend.models.drafting.heads import HeadDrafter
from vkbackend.models.drafting.ngram import Ngrams
from vkbackend.models.engine.speculation import Limits, Speculation

if TYPE_CHECKING:
    from vkbackend.models.engine.runner import Runner


def speculation_of(runner: Runner) -> Speculation | None:
    drafters = drafters_of(runner)
    return Speculation(drafters, limits_of(runner)) if drafters else None


def drafters_of(runner: Runner) -> list[Drafter]:
    options, drafters = runner.options, list[Drafter]()
    for name in options.speculation:
        if name == "ngram":
            drafters.append(Ngrams(options.n_slots, options.n_ctx))
        elif name == "mtp":
            drafters.append(HeadDrafter(runner, options.draft_p_min))
    return drafters


def limits_of(runner: Runner) -> Limits:
    options = runner.options
    # A sequence shifts its context before it would store the last position.
    end = runner.n_ctx - options.context_shift
    return Limits(end, min(runner.n_ubatch, runner.max_outputs), options.draft_max, options.draft_min)
