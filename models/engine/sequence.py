from __future__ import annotations

import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import numpy as np

from vkbackend.errors import VkbackendError
from vkbackend.models.drafting.acceptance import Acceptance
from vkbackend.models.engine.cache.image_spans import SequenceImages, without_images
from vkbackend.models.engine.cache.mark import Mark, shifted
from vkbackend.models.engine.cache.restoring import Restore
from vkbackend.models.engine.messages import (
    Answer,
    Embed,
    ErrorData,
    Event,
    Generate,
    Logits,
    PromptProgress,
    Timings,
)
from vkbackend.models.engine.step_times import StepCost
from vkbackend.models.sampling.logprobs import Logprobs
from vkbackend.models.sampling.rows import Choice
from vkbackend.models.sampling.sampler import Sampler

PRIORITY_S = 10.0  # each unit of priority counts as this much waiting time


@dataclass(slots=True, eq=False)
class Sequence:
    """The slot's cache holds `tokens[:n_stored]`, and blocks for `room` positions. After a context shift,
    `tokens` lacks the discarded tokens."""

    request: Generate | Logits | Embed
    number: int
    born: float  # time.monotonic()
    tokens: list[int]
    sampler: Sampler | None
    slot: int = -1
    n_stored: int = 0
    room: int = 0
    served: int = -1  # The last step in which the sequence had rows.
    known_slot: int = -1  # The slot in the last event to the caller.
    n_cached: int = 0  # Positions found in the cache.
    started: float = 0.0  # When the slot was assigned.
    n_given: int = 0  # Rows of logits or hidden states that the caller has received.
    is_over: bool = False
    is_paused: bool = False  # The caller reads no answers.
    in_flight: bool = False
    prompt_n: int = 0
    prompt_s: float = 0.0
    decode_n: int = 0
    decode_s: float = 0.0
    n_reduces: int = 0
    reduce_s: float = 0.0
    n_discarded: int = 0  # Tokens that context shifts have removed from `tokens`.
    n_kept: int = 0  # The first tokens that context shifts kept.
    mark: Mark = ()
    has_moved_cells: bool = False  # A context shift has moved the cells after position `n_kept`.
    shifted_at: int = -1  # `n_generated` at the last context shift.
    restore: Restore | None = None  # Loads stored blocks into the slot, before the first step.
    n_restores: int = 0  # Tries so far.
    draft: Tokens[int] = ()  # Guesses of the tokens after `tokens`, while a step verifies them.
    draft_source: str = ""
    acceptance: Acceptance | None = None  # None before the sequence's first draft
    n_matched: int = 0  # How many tokens of `draft` were right so far.
    replays: bool = False  # Generated tokens are computed again, because a recurrent state went back.
    n_drafted: int = 0
    n_accepted: int = 0
    stage: int = -1  # As in StepKind. A stage computes all positions before the next one begins.
    n_stages: int = 0
    images: SequenceImages | None = None
    n_asked: int = field(init=False)  # How many tokens of `history` belong to the prompt.
    is_embedded: bool = field(init=False)  # The request needs hidden states instead of logits.
    second: int = field(init=False)  # As in `Embed`.
    history: list[int] = field(init=False)  # Includes discarded tokens, but no rows of images.
    order: tuple[float, int] = field(init=False)  # a lower value runs earlier

    def __post_init__(self) -> None:
        self.history, self.is_embedded = self.tokens, isinstance(self.request, Embed)
        self.n_asked = len(self.request.tokens)
        self.second = self.request.second if isinstance(self.request, Embed) else 0
        self.order = self.born + PRIORITY_S * self.request.priority, self.number

    def show(self, images: SequenceImages) -> None:
        self.images, self.history = images, without_images(self.tokens)
        self.n_asked -= len(self.tokens) - len(self.history)

    @property
    def n_wanted(self) -> int:
        """Return how many tokens are not computed yet, which is 1 while decoding."""
        return len(self.tokens) - self.n_stored

    @property
    def decodes(self) -> bool:
        return self.n_wanted == 1 or self.replays

    @property
    def n_generated(self) -> int:
        return len(self.history) - self.n_asked

    @property
    def wanted_slot(self) -> int | None:
        return self.request.slot if isinstance(self.request, Generate) else None

    @property
    def sharable(self) -> int:
        """Return how many leading positions may come from the cache. The last position must be computed. So
        must each position whose row the caller still needs."""
        return len(self.tokens) - 1 if self.uses_cache else self.n_given

    @property
    def uses_cache(self) -> bool:
        """Return whether only the last position's row is needed. Then earlier positions may come from the
        cache."""
        request = self.request
        if isinstance(request, Generate):
            return request.uses_cache
        return isinstance(request, Embed) and request.rows == "last"

    @property
    def needs_all_rows(self) -> bool:
        """Return whether the caller gets a row of each position."""
        request = self.request
        return isinstance(request, Logits) or (isinstance(request, Embed) and request.rows == "all")

    @property
    def takes_first(self) -> bool:
        """Return whether the caller gets only the row of position 0."""
        return isinstance(self.request, Embed) and self.request.rows == "first"

    def n_outputs(self, n: int) -> int:
        """Return how many of the next `n` positions are output rows. A request outputs all rows that the
        caller lacks, or only the first row, or the last row and a row for each drafted token."""
        if 0 <= self.stage < self.n_stages - 1:
            return 0
        if self.needs_all_rows:
            return max(0, self.n_stored + n - max(self.n_stored, self.n_given))
        if self.takes_first:
            return int(self.n_stored == 0)
        return max(0, n - self.n_wanted + 1)

    def advance(self, n: int, cost: StepCost) -> None:
        self.in_flight, self.served = False, cost.number
        self.n_stored += n
        if 0 <= self.stage < self.n_stages - 1 and self.n_wanted == 0:
            self.stage, self.n_stored = self.stage + 1, 0
        self.n_drafted += len(self.draft)
        self.replays = self.replays and self.n_wanted > 0
        if self.n_stored + self.n_discarded <= len(self.request.tokens):
            self.prompt_n += n
            self.prompt_s += cost.latency_s
        else:
            self.decode_s += cost.latency_s
        self.n_reduces += cost.n_reduces
        self.reduce_s += cost.reduce_s

    def accepts(self, token: int) -> bool:
        """Return whether the answer's last token equals the next token of the draft, and count it as accepted
        if so. Then the step's next row has the logits after it."""
        if self.n_matched == len(self.draft) or self.draft[self.n_matched] != token:
            return False
        self.n_matched += 1
        self.n_accepted += 1
        self.n_stored += 1
        return True

    def end_draft(self, n_stored: int) -> None:
        """Forget the draft. The slot continues from the first `n_stored` positions. If a recurrent state was
        restored, `n_stored` is smaller than before the draft."""
        self.replays = n_stored < self.n_stored
        self.draft, self.n_matched, self.n_stored = (), 0, n_stored

    def shift(self, n_kept: int, n_discarded: int) -> None:
        """Discard `n_discarded` tokens after the first `n_kept`. The cells have been moved, unless the
        sequence was preempted and has no cells."""
        self.tokens = self.tokens[:n_kept] + self.tokens[n_kept + n_discarded :]
        self.n_stored = max(0, self.n_stored - n_discarded)
        self.n_discarded += n_discarded
        self.n_kept, self.room, self.shifted_at = n_kept, 0, self.n_generated
        self.has_moved_cells = self.slot >= 0
        self.mark = shifted(self.mark, n_kept)

    def answer(self, choice: Choice, n_ctx: int | None) -> Answer:
        """Append the chosen token and return the answer. The answer is an int if the caller knows the slot
        and needs only the token. An event with `done` set ends the sequence. If `n_ctx` is None, a full
        context is shifted."""
        request = self.request
        assert isinstance(request, Generate)
        if isinstance(choice, VkbackendError):
            return self.failure(choice)
        self.tokens.append(choice)
        if self.history is not self.tokens:
            self.history.append(choice)
        self.decode_n += self.n_generated > 1
        sampler = self.sampler
        logprobs = sampler.logprobs if sampler else None
        if choice in request.stop_ids or (sampler and sampler.matcher and sampler.matcher.is_over):
            return self.last(choice, "stop", logprobs)
        if self.n_generated == request.max_tokens or (n_ctx is not None and self.n_stored >= n_ctx):
            return self.last(choice, "length", logprobs)
        if self.known_slot == self.slot and not request.timed and logprobs is None:
            return choice
        self.known_slot = self.slot
        timings = self.timings() if request.timed else None
        return Event(
            request.id,
            done=False,
            token=choice,
            slot=self.slot,
            timings=timings,
            logprobs=logprobs,
            n_discarded=self.n_discarded,
        )

    def progress(self) -> Event | None:
        """Return an event with the progress of the prompt if the caller wants such events."""
        request = self.request
        if not isinstance(request, Generate) or not request.reports_progress or self.n_generated:
            return None
        total = len(request.tokens)
        took_s = time.monotonic() - self.started
        report = PromptProgress(total, self.n_cached, min(self.n_stored, total), took_s)
        return Event(request.id, done=False, slot=self.slot, progress=report)

    def last(self, token: int | None, reason: str, logprobs: Logprobs | None = None) -> Event:
        return Event(
            self.request.id,
            token=token,
            finish_reason=reason,
            slot=self.slot,
            timings=self.timings(),
            logprobs=logprobs,
            n_discarded=self.n_discarded,
        )

    def give(self, rows: np.ndarray) -> Event:
        """Return the logits or hidden states of the step's rows. `done` is set in the last event."""
        self.n_given += len(rows)
        done = self.n_wanted == 0 or not self.needs_all_rows
        if self.is_embedded:
            return Event(self.request.id, hidden=rows, done=done, slot=self.slot)
        return Event(self.request.id, logits=rows.copy(), done=done, slot=self.slot)

    def failure(self, error: VkbackendError) -> Event:
        return Event(self.request.id, slot=self.slot, error=ErrorData.of(error))

    def timings(self) -> Timings:
        times = self.prompt_n, self.prompt_s, self.decode_n, self.decode_s, self.n_reduces, self.reduce_s
        return Timings(*times, self.n_drafted, self.n_accepted)


Batch = list[tuple[Sequence, int, int]]  # (sequence, rows, rows with logits)

NEVER_KEPT = 4  # A shift keeps at most n_ctx - 4 tokens, as in llama.cpp.


def is_full(sequence: Sequence, n_ctx: int) -> bool:
    """Return whether a decoding sequence must discard tokens before its next step. As in llama.cpp, at most
    one shift happens per token."""
    decodes = sequence.n_generated > 0 and sequence.n_wanted == 1 and isinstance(sequence.request, Generate)
    return decodes and sequence.n_stored + 1 >= n_ctx and sequence.shifted_at < sequence.n_generated


def shift_of(sequence: Sequence, n_ctx: int) -> tuple[int, int]:
    """Return how many of the first tokens a shift keeps, and how many of the next tokens it discards."""
    request = sequence.request
    assert isinstance(request, Generate)
    n_kept = min(request.n_keep, n_ctx - NEVER_KEPT)
    n_left = len(sequence.tokens) - 1 - n_kept
    return n_kept, min(request.n_discard or n_left // 2, n_left - 1)
