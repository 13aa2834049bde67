"""Builds the drafter that the options name."""

from __future__ import annotations

from vkbackend.models.drafting.drafter import Drafter
from vkbackend.models.drafting.ngram import Ngrams
from vkbackend.models.options import Options


def drafter_of(options: Options) -> Drafter | None:
    """`options` are the runner's, with the final context length."""
    if "ngram" in options.speculation:
        return Ngrams(options.n_slots, options.n_ctx)
    return None
