"""Checks the requests that run as sequences, and makes their sequences."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vkbackend.errors import QueueFull
from vkbackend.models.engine.cache.image_spans import SequenceImages, check_images
from vkbackend.models.engine.cache.mark import mark_of
from vkbackend.models.engine.messages import (
    Embed,
    Generate,
    Logits,
    check_adapters,
    check_encoder,
    check_slot,
    check_tokens,
)
from vkbackend.models.engine.sequence import Sequence
from vkbackend.models.sampling.sampler import Sampler
from vkbackend.step import MAX_RUNS

if TYPE_CHECKING:
    from vkbackend.models.engine.runner.runner import Runner


def max_text(runner: Runner) -> int:
    """Return the maximum number of tokens of a text to embed. A decoder computes it in parts, and some
    encoders in stages."""
    one_step = runner.encodes and not runner.n_stages
    return min(runner.n_ctx, runner.n_ubatch) if one_step else runner.n_ctx


def check_request(request: Generate | Logits | Embed, runner: Runner, n_waiting: int) -> None:
    """Check a request against the model, its slots and the queue, in which `n_waiting` requests wait. Raises
    InvalidArgument, PromptTooLong, UnsupportedModel and QueueFull."""
    spans = request.images if isinstance(request, Generate) else ()
    check_tokens(request.tokens, runner.n_vocab, runner.n_ctx, spans)
    if spans:
        n_free = runner.n_ubatch - runner.n_slots + 1  # Each of the other slots may need a row.
        check_images(request.tokens, spans, runner.image_width, n_free)
    check_adapters(request.adapters, runner.adapters)
    if runner.encodes:
        check_encoder(request, max_text(runner))
    if isinstance(request, Generate) and request.slot is not None:
        check_slot(request.slot, runner.n_slots)
    if n_waiting >= runner.options.n_queue:
        raise QueueFull(
            f"{n_waiting} requests wait for one of {runner.n_slots} slots, and no more may (n_queue); "
            "try again later, or open the model with more slots (n_slots)"
        )


def sequence_of(request: Generate | Logits | Embed, number: int, runner: Runner) -> Sequence:
    """Return the sequence of a checked request. `number` counts the engine's requests."""
    sampler = None
    tokens = list(request.tokens)
    if isinstance(request, Generate):
        sampler = Sampler(request.sampling, request.structure is not None)
        sampler.resume(len(request.resumed))
        tokens += request.resumed
    sequence = Sequence(request, number, time.monotonic(), tokens, sampler)
    if runner.encodes and len(request.tokens) > runner.n_ubatch:
        sequence.stage, sequence.n_stages = 0, runner.n_stages
    if isinstance(request, Generate) and request.images:
        sequence.show(SequenceImages(request.images, runner.has_sections, MAX_RUNS // runner.n_slots))
    if request.adapters:
        sequence.mark = mark_of(request.tokens, request.adapters, runner.adapters)
    return sequence
