"""Builds the speculation that the options ask for."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from vkbackend.models.drafting.draft_model import DraftModel
from vkbackend.models.drafting.drafter import Drafter
from vkbackend.models.drafting.heads import HeadDrafter
from vkbackend.models.drafting.ngram import Ngrams
from vkbackend.models.drafting.prices import ROWS
from vkbackend.models.drafting.vocabulary import check_vocabulary
from vkbackend.models.engine.runner.draft_runner import DraftRunner, HeadRunner
from vkbackend.models.engine.speculation import Limits, Speculation
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options

if TYPE_CHECKING:
    from vkbackend.models.engine.runner.runner import Runner


def open_draft(options: Options) -> Runner | None:
    """Open the draft model of the options, if there is one. Open it before the model, whose layout then uses
    the remaining memory."""
    wanted = options.of_draft
    if wanted is None:
        return None
    from vkbackend.models.engine.runner.runner import Runner

    with GGUF.open(options.path) as model, GGUF.open(wanted.path) as draft:
        check_vocabulary(model, draft)
        if not wanted.n_ctx:
            key = f"{model.architecture}.context_length"
            wanted = replace(wanted, n_ctx=int(model.u32(key)))
        return Runner(wanted, draft)


def speculation_of(runner: Runner, draft: Runner | None = None) -> Speculation | None:
    drafters = drafters_of(runner, draft)
    if not drafters:
        return None
    runner.record_decoding(ROWS)
    return Speculation(drafters, limits_of(runner))


def drafters_of(runner: Runner, draft: Runner | None = None) -> list[Drafter]:
    options, drafters = runner.options, list[Drafter]()
    for name in options.speculation:
        if name == "ngram":
            drafters.append(Ngrams(options.n_slots, options.n_ctx))
        elif name in ("mtp", "eagle3"):
            drafters.append(HeadDrafter(HeadRunner(runner), options.draft_p_min, source=name))
        elif draft is not None:
            drafters.append(_draft_model(runner, draft))
    return drafters


def _draft_model(runner: Runner, draft: Runner) -> DraftModel:
    model = DraftModel(
        DraftRunner(draft),
        runner.n_slots,
        runner.n_vocab,
        runner.options.draft_p_min,
        is_busy=lambda: not runner.is_idle,
        clock=lambda: perf_counter() - draft.record_s,
    )
    model.measure()
    return model


def limits_of(runner: Runner) -> Limits:
    options = runner.options
    # A sequence shifts its context before it would store the last position.
    end = runner.n_ctx - options.context_shift
    return Limits(end, min(runner.n_ubatch, runner.max_outputs), options.draft_max, options.draft_min)
