"""Drafts tokens for the sequences of a decoding step, which verifies them.

A step computes the rows of all drafted tokens, and the sequence's sampler chooses a token from each row, one
after another. Each choice that equals the drafted token makes the next row valid, so the tokens are the same
as without drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Any

from vkbackend.models.drafting.acceptance import Acceptance
from vkbackend.models.drafting.account import Account
from vkbackend.models.drafting.drafter import Draft, Drafter, Want
from vkbackend.models.drafting.prices import Length, StepPrices, best_length, best_lengths
from vkbackend.models.engine.cache.mark import adapters_at
from vkbackend.models.engine.messages import Generate
from vkbackend.models.engine.sequence import Sequence
from vkbackend.ops import MAX_VEC_ROWS

# If no draft saves time, the engine tries a draft after this many steps, to learn the acceptance, and then
# less and less often.
PROBE, MAX_PROBE = 16, 1024
N_TRIED = 1  # tokens per try
# A draft model may spend this share of time on tokens that it has not computed. For the first draft, it is a
# share of the time for the remaining answer. Later it is a share of the time of all steps. In a try, it is a
# share of the time since the last draft.
TRY_SHARE = 0.02
PAUSE = 8  # steps after which a model or head that saves no time is considered again
SELDOM = 4  # After PAUSE drafts that would save no time, only every fourth step is drafted.
QUIET = 16  # After this many steps without a draft, the drafters are asked before every fourth step only.
SURE = 0.5  # share of the expected saving that skipped tokens may cost, if drafts already saved it
EXPECTED = 256  # An answer is expected to have at most this many more tokens.

Reserve = Callable[[int, int], bool]


@dataclass(frozen=True, slots=True)
class Limits:
    """A draft has `n_min` to `n_max` tokens. `end` is the first position that has no cell. A step with drafts
    has at most `max_rows` rows. It never has more than MAX_VEC_ROWS, because the kernels of larger steps add
    in another order, and their logits differ in the last bits."""

    end: int
    max_rows: int
    n_max: int = MAX_VEC_ROWS - 1
    n_min: int = 0


class Speculation:
    """The first drafter with a draft for a sequence wins."""

    def __init__(
        self,
        drafters: Sequences[Drafter],
        limits: Limits,
        prices: StepPrices | None = None,
        acceptance: Acceptance | None = None,
    ) -> None:
        self._drafters, self._limits = drafters, limits
        self._max_rows = min(MAX_VEC_ROWS, limits.max_rows)
        self._prices = prices or StepPrices()
        self._common = acceptance or Acceptance()
        self._drafter_of: dict[int, Drafter] = {}  # by slot
        self._n_steps, self._probe_at, self._interval = 0, PROBE, PROBE
        self._resume_at = 0  # no drafter is asked before this step, except in a try
        self._pauses = False  # The last step came before `_resume_at`.
        self._n_quiet = 0  # steps without a draft since the last draft
        self._n_refused = 0  # refused drafts since the last verified draft
        self._account = Account()
        self._token_s = 0.0  # seconds per token that the last step would take without drafts
        self._asked_at: dict[Drafter, int] = {}  # the step of the last draft
        self._invested_s: dict[Drafter, float] = {}  # seconds that each drafter spent on missing tokens
        self._budget_s = 0.0  # seconds that may be spent on missing tokens
        self._followed: dict[tuple[Drafter, int], tuple[int, float]] = {}  # slot -> (number, seconds)
        self._paused: dict[Drafter, int] = {}  # the step at which the drafter is considered again
        self.n_drafts = self.n_drafted = self.n_accepted = 0
        self.n_accepted_at = [0] * (MAX_VEC_ROWS - 1)  # accepted tokens by position in the draft

    def draft(self, line: Sequences[Sequence], reserve: Reserve) -> None:
        """Set `draft` of each sequence. All sequences decode. `reserve` takes free cells for the positions of
        a slot up to an end, or returns False."""
        for sequence in line:
            sequence.draft = ()
        self._n_steps += 1
        tries = self._n_steps >= self._probe_at
        self._pauses = self._n_steps < self._resume_at and not tries
        if self._pauses:
            return
        n_rows = sum([sequence.n_wanted for sequence in line])
        plain_s = self._prices.seconds(len(line)) if line else None
        if plain_s is None:
            return
        self._account.begin(plain_s)
        self._token_s = plain_s / len(line)
        if n_rows > len(line):  # tokens of a rejected draft that are computed again
            self._account.spend(self._prices.known(n_rows) - plain_s)
        if self._account.is_spent and not tries:
            return
        n_left = self._max_rows - n_rows
        # Without the time of plain decoding, no draft is known to save time.
        if n_left <= 0 or not self._prices.is_measured(n_rows):
            return
        if self._n_refused >= PAUSE and self._n_steps % SELDOM and not tries:
            return
        waiting = [(s, n) for s in line if (n := min(n_left, self._most(s))) > 0]
        drafted: list[tuple[Sequence, Draft]] = []
        for drafter in self._drafters:
            if waiting:
                waiting = self._ask(drafter, waiting, drafted, n_rows, tries, reserve)
        lengths: list[int] = []
        if not drafted:
            self._n_quiet += 1
            self._resume_at = min([self._paused.get(drafter, 0) for drafter in self._drafters])
            if self._n_quiet >= QUIET:
                self._resume_at = max(self._resume_at, self._n_steps + SELDOM)
        else:
            self._n_quiet = 0
            survivals = [_survival(sequence, draft, self._limits.n_min) for sequence, draft in drafted]
            lengths = best_lengths(n_rows, len(line), survivals, self._prices, self._max_rows, tries=tries)
            lengths = [n if n >= self._limits.n_min else 0 for n in lengths]
            self._n_refused = 0 if any(lengths) else self._n_refused + 1
        if tries:
            self._interval = min(2 * self._interval, MAX_PROBE)
        elif any(lengths) and self._account.is_even:
            self._interval = PROBE
        if tries or any(lengths):
            self._probe_at = self._n_steps + self._interval
            self._account.spend(self._prices.known(n_rows + sum(lengths)) - self._prices.known(n_rows))
        for (sequence, draft), n in zip(drafted, lengths, strict=True):
            if n:
                sequence.draft, sequence.draft_source = draft.tokens[:n], draft.source

    def _most(self, sequence: Sequence) -> int:
        request, limits, n_generated = sequence.request, self._limits, sequence.n_generated
        # Before its first generated token, a sequence may read a state that the prefix cache takes back.
        if not isinstance(request, Generate) or not n_generated or sequence.served < 0:
            return 0
        n = min(limits.n_max, limits.end - len(sequence.tokens))
        if request.draft_max is not None:
            n = min(n, request.draft_max)
        if request.max_tokens is not None:
            n = min(n, request.max_tokens - n_generated - 1)
        return n

    def _ask(
        self,
        drafter: Drafter,
        waiting: list[tuple[Sequence, int]],
        drafted: list[tuple[Sequence, Draft]],
        n_rows: int,
        tries: bool,
        reserve: Reserve,
    ) -> list[tuple[Sequence, int]]:
        """Add the drafter's drafts to `drafted`, and return the sequences for which it has none."""
        before_s, is_timed = drafter.spent_s, drafter.seconds > 0
        most, spend_s = self._length(drafter, waiting, n_rows, tries)
        if not most:
            self._account.spend(drafter.spent_s - before_s)
            return waiting
        self._asked_at[drafter] = self._n_steps
        left: list[tuple[Sequence, int]] = []
        if drafter.stores:
            ends = [s.n_stored + s.n_wanted + min(n, most) for s, n in waiting]
            fits = [reserve(s.slot, end) for (s, _), end in zip(waiting, ends, strict=True)]
            left = [entry for entry, fit in zip(waiting, fits, strict=True) if not fit]
            waiting = [entry for entry, fit in zip(waiting, fits, strict=True) if fit]
        wants = [_want(s, min(n, most), drafter, spend_s) for s, n in waiting]
        for (sequence, n), draft in zip(waiting, drafter.draft(wants) if wants else [], strict=True):
            if draft.tokens and (draft := _cut(sequence, draft)).tokens:
                drafted.append((sequence, draft))
                self._drafter_of[sequence.slot] = drafter
                self._acceptance(sequence)
            else:
                left.append((sequence, n))
        spent_s = drafter.spent_s - before_s
        # If the drafter lacks only a few tokens, it computes them in the step of the first drafted token. The
        # time per token is unknown before the first draft of a head, whose first steps may be slow.
        if is_timed and (invested_s := spent_s - most * drafter.seconds) > drafter.seconds:
            for sequence, _ in waiting:
                own_s = invested_s / len(waiting) + self._invested_for(drafter, sequence)
                self._followed[drafter, sequence.slot] = sequence.number, own_s
            self._invested_s[drafter] += min(invested_s, max(0.0, self._budget_s))
            self._account.invest(invested_s)
            spent_s -= invested_s
        self._account.spend(spent_s)
        return left

    def _length(
        self, drafter: Drafter, waiting: list[tuple[Sequence, int]], n_rows: int, tries: bool
    ) -> tuple[int, float]:
        """Return how many tokens to draft for each sequence, and how many seconds per sequence the drafter
        may spend on tokens that it has not computed."""
        seconds, n = drafter.seconds, len(waiting)
        if not seconds:
            return self._max_rows, 0.0
        if not self._prices.is_sure(n_rows) or (self._n_steps < self._paused.get(drafter, 0) and not tries):
            return 0, 0.0
        share_s = TRY_SHARE * self._prices.least(n_rows)
        spend_s = self._budget_s = self._budget(drafter, waiting, share_s)
        best, most = self._best(drafter, waiting, n_rows, spend_s)
        if self._account.saved_s > spend_s:  # a draft model that has read all of the text may draft better
            rate = sum([self._acceptance(sequence).rate(drafter.source) for sequence, _ in waiting]) / n
            whole = best_length(n_rows, n, rate, self._prices, self._max_rows, seconds)
            n_left = sum([self._n_left(sequence) for sequence, _ in waiting])
            more_s = min(SURE * (whole.saved_s - best.saved_s) * n_left, self._account.saved_s)
            better, n_better = self._best(drafter, waiting, n_rows, max(more_s, spend_s))
            if better.saved_s > best.saved_s:
                best, most, spend_s = better, n_better, more_s
        if not best.n:
            self._paused[drafter] = self._n_steps + PAUSE
            right = best_length(n_rows, n, 1.0, self._prices, self._max_rows, seconds)
            if not tries or (not right.n and drafter.measure()):
                return 0, 0.0  # even right drafts may save no time
        owed_s = drafter.owed([_want(sequence, 1, drafter) for sequence, _ in waiting])
        if not best.n:
            spend_s = share_s * (self._n_steps - self._asked_at.get(drafter, 0))
            spend_s -= N_TRIED * seconds + self._prices.known(n_rows + 1) - self._prices.known(n_rows)
            return (N_TRIED if owed_s <= spend_s else 0), spend_s / n
        if owed_s > max(seconds, spend_s):
            self._paused[drafter] = self._n_steps + PAUSE
            return 0, 0.0
        return min(best.n, max(N_TRIED, self._limits.n_min, most)), spend_s / n

    def _best(
        self, drafter: Drafter, waiting: list[tuple[Sequence, int]], n_rows: int, spend_s: float
    ) -> tuple[Length, int]:
        """Return the best length of drafts, and the longest length to try. Assume that the drafter spends
        `spend_s` seconds on tokens that it has not computed."""
        n, rate, most = len(waiting), 0.0, 0
        for sequence, _ in waiting:
            source = drafter.source_of(_want(sequence, 1, drafter, spend_s / n))
            learned = self._acceptance(sequence)
            rate, most = rate + learned.rate(source) / n, max(most, learned.limit(source))
        return best_length(n_rows, n, rate, self._prices, self._max_rows, drafter.seconds), most

    def _budget(self, drafter: Drafter, waiting: list[tuple[Sequence, int]], share_s: float) -> float:
        """Return how many seconds the drafter may spend on tokens that it has not computed."""
        # Unspent time of more than MAX_PROBE steps is forgotten.
        least_s = share_s * (self._n_steps - MAX_PROBE)
        invested_s = self._invested_s[drafter] = max(least_s, self._invested_s.get(drafter, 0.0))
        firsts = [share_s * self._n_left(s) - self._invested_for(drafter, s) for s, _ in waiting]
        return max(sum(firsts) / len(waiting), share_s * self._n_steps - invested_s)

    def _invested_for(self, drafter: Drafter, sequence: Sequence) -> float:
        number, seconds = self._followed.get((drafter, sequence.slot), (-1, 0.0))
        return seconds if number == sequence.number else 0.0

    def _n_left(self, sequence: Sequence) -> int:
        """Return how many more tokens the sequence is expected to generate at most."""
        assert isinstance(sequence.request, Generate)
        n, most = self._limits.end - sequence.n_stored, sequence.request.max_tokens
        return min(n, EXPECTED, EXPECTED if most is None else most - sequence.n_generated)

    def _acceptance(self, sequence: Sequence) -> Acceptance:
        if sequence.acceptance is None:
            sequence.acceptance = Acceptance(self._common)
        return sequence.acceptance

    def verified(self, sequence: Sequence) -> None:
        """Learn from a draft before the sequence forgets it."""
        n_drafted, n_accepted = len(sequence.draft), sequence.n_matched
        self.n_drafts += 1
        self.n_drafted += n_drafted
        self.n_accepted += n_accepted
        self._account.earn(n_accepted * self._token_s)
        for at in range(n_accepted):
            self.n_accepted_at[at] += 1
        self._acceptance(sequence).learn(sequence.draft_source, n_drafted, n_accepted)
        self._drafter_of[sequence.slot].took(sequence.slot, n_accepted)

    def learn(self, n_rows: int, seconds: float) -> None:
        """Learn from the time of a decoding step. Call this only for steps whose commands had been recorded
        before. Steps during a pause are left out."""
        if not self._pauses:
            self._prices.learn(n_rows, seconds)

    def stats(self) -> dict[str, Any]:
        return {
            "n_drafts": self.n_drafts,
            "n_drafted": self.n_drafted,
            "n_accepted": self.n_accepted,
            "n_accepted_at": list(self.n_accepted_at),
        }

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()


def _want(sequence: Sequence, n: int, drafter: Drafter, spend_s: float = 0.0) -> Want:
    tokens = sequence.tokens
    adapters = adapters_at(sequence.mark, len(tokens) - 1) if sequence.mark else ()
    want = Want(sequence.slot, sequence.number, tokens, sequence.history, n, adapters, spend_s=spend_s)
    if sequence.images is None:
        return want
    if drafter.stores:
        return want._replace(rope_offset=sequence.images.rope_offset)
    return want._replace(tokens=sequence.history)  # Other models read only the text.


def _survival(sequence: Sequence, draft: Draft, least: int) -> list[float]:
    """For each token, return the probability that it and all tokens before it are accepted. Leave out tokens
    after the source's `limit`, which grows as tokens are accepted."""
    assert sequence.acceptance is not None
    rate, most = sequence.acceptance.rate(draft.source), sequence.acceptance.limit(draft.source)
    return [rate ** (j + 1) for j in range(min(max(most, least), len(draft.tokens)))]


def _cut(sequence: Sequence, draft: Draft) -> Draft:
    """Truncate the draft before an end token, after which no row is needed, and before a token that the
    grammar forbids."""
    assert isinstance(sequence.request, Generate)
    stop_ids, tokens = sequence.request.stop_ids, draft.tokens
    n = next((i for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
    matcher = sequence.sampler.matcher if sequence.sampler else None
    if matcher and n:
        n = min(n, matcher.n_valid(tokens[:n]))
    return draft if n == len(tokens) else Draft(tokens[:n], draft.source)
