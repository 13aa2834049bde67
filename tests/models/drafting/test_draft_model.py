"""A fake model stores tokens in its cells, so a wrong or missing cell changes its drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf

import numpy as np
import pytest

from vkbackend.models.drafting.draft_model import SHORT, SINK, DraftModel, Rows
from vkbackend.models.drafting.drafter import Want

pytestmark = pytest.mark.no_vulkan

N_VOCAB = 40


def after(tokens: Sequence[int]) -> int:
    return hash(tuple(tokens)) % N_VOCAB


class Cells:
    """A slot can continue only at multiples of `step`, as in a recurrent model, which stores only some
    states."""

    def __init__(self, n_ctx: int = 64, n_ubatch: int = 16, step: int = 1, n_slots: int = 3) -> None:
        self.n_ctx, self.n_vocab, self.n_ubatch, self._step = n_ctx, N_VOCAB, n_ubatch, step
        self.cells: list[list[int]] = [[] for _ in range(n_slots)]
        self.n_calls = self.n_rows = self.closed = 0

    def rewind(self, slot: int, n: int) -> int:
        assert n <= len(self.cells[slot])
        n = n // self._step * self._step
        del self.cells[slot][n:]
        return n

    def best(self, rows: Sequence[Rows], summed: bool) -> tuple[np.ndarray, np.ndarray | None]:
        assert 0 < sum(len(row.tokens) for row in rows) <= self.n_ubatch
        self.n_calls += 1
        for slot, first, tokens, _ in rows:
            assert first == len(self.cells[slot]) and first + len(tokens) <= self.n_ctx
            self.cells[slot] += tokens
            self.n_rows += len(tokens)
        ids = np.array([after(self.cells[row.slot]) for row in rows])
        return ids, ids / N_VOCAB if summed else None

    def close(self) -> None:
        self.closed += 1


def drafted(tokens: Sequence[int], n: int) -> list[int]:
    out = list(tokens)
    for _ in range(n):
        out.append(after(out))
    return out[len(tokens) :]


def want(tokens: list[int], n: int, slot: int = 0) -> Want:
    return Want(slot, slot, tokens, tokens, n)


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_follow_accepted_and_rejected_tokens(step: int, seed: int) -> None:
    rng, model = random.Random(seed), Cells(step=step, n_ctx=200)
    drafter = DraftModel(model, 3, N_VOCAB)
    texts = [[rng.randrange(N_VOCAB) for _ in range(rng.randint(1, 9))] for _ in range(3)]
    for _ in range(40):
        slots = rng.sample(range(3), rng.randint(1, 3))
        wants = [want(texts[slot], rng.randint(1, 5), slot) for slot in slots]
        if max(map(len, texts)) > 150:
            texts = [[rng.randrange(N_VOCAB) for _ in range(5)] for _ in range(3)]  # other sequences
            continue
        for w, draft in zip(wants, drafter.draft(wants), strict=True):
            if draft.tokens:  # else it catches up
                assert list(draft.tokens) == drafted(w.tokens, w.n)
            n = rng.randint(0, len(draft.tokens))
            texts[w.slot] += [*draft.tokens[:n], rng.randrange(N_VOCAB)]


def test_only_missing_tokens_are_computed() -> None:
    model = Cells()
    drafter = DraftModel(model, 3, N_VOCAB)
    [draft] = drafter.draft([want([1, 2, 3], 3)])
    assert model.n_rows == 3 + 2, "the last drafted token is not computed"
    drafter.draft([want([1, 2, 3, *draft.tokens, 9], 3)])
    assert model.n_rows == 5 + 2 + 2


def test_a_long_prompt_is_computed_over_several_drafts() -> None:
    model = Cells(n_ubatch=16)
    drafter = DraftModel(model, 3, N_VOCAB)
    tokens = [i % N_VOCAB for i in range(40)]
    paid = want(tokens, 3)._replace(spend_s=inf)
    lengths = [len(drafter.draft([paid])[0].tokens) for _ in range(3)]
    assert lengths == [0, 0, 3] and model.n_rows == 40 + 2


def test_sequences_draft_together() -> None:
    model = Cells()
    drafter = DraftModel(model, 3, N_VOCAB)
    drafts = drafter.draft([want([5 + slot], 2 + slot, slot) for slot in range(3)])
    assert [len(draft.tokens) for draft in drafts] == [2, 3, 4] and model.n_calls == 4


def test_improbable_tokens_end_a_draft() -> None:
    drafter = DraftModel(Cells(), 3, N_VOCAB, p_min=0.5)
    rng = random.Random(1)
    for _ in range(20):
        tokens = [rng.randrange(N_VOCAB) for _ in range(5)]
        [draft] = drafter.draft([want(tokens, 5)])
        expected = drafted(tokens, 5)
        n = next((i for i, token in enumerate(expected) if token < N_VOCAB / 2), 5)
        assert list(draft.tokens) == expected[:n]


def test_limits_of_the_draft_model() -> None:
    """Tokens that one vocabulary lacks are neither drafted nor computed, and a full context ends drafts."""
    drafter = DraftModel(Cells(n_ctx=16), 3, 10)
    assert all(token < 10 for i in range(10) for token in drafter.draft([want([i], 5)])[0].tokens)
    drafter = DraftModel(Cells(n_ctx=16), 3, N_VOCAB)
    assert not drafter.draft([want([1, N_VOCAB], 3)])[0].tokens
    assert len(drafter.draft([want([1] * 15, 5)])[0].tokens) == 2
    assert not drafter.draft([want([1] * 17, 3)])[0].tokens


def test_nothing_is_drafted_while_steps_are_in_flight() -> None:
    model = Cells()
    drafter = DraftModel(model, 3, N_VOCAB, is_busy=lambda: True)
    assert not drafter.draft([want([1], 3)])[0].tokens and not model.n_calls
    drafter.close()
    assert model.closed == 1


def test_measuring_changes_no_draft() -> None:
    """To measure a step, the drafter computes a row after the stored tokens. The next draft overwrites its
    cell."""
    now = 0.0
    model = Cells()
    best = model.best

    def slow(rows: Sequence[Rows], summed: bool) -> tuple[np.ndarray, np.ndarray | None]:
        nonlocal now
        now += 1.0 + 0.1 * sum(len(row.tokens) for row in rows)
        return best(rows, summed)

    model.best = slow  # type: ignore[method-assign]
    drafter = DraftModel(model, 3, N_VOCAB, clock=lambda: now)
    assert drafter.measure() and drafter.seconds == pytest.approx(1.1)
    calls = model.n_calls
    assert drafter.measure() and model.n_calls == calls, "it takes a small share of the time"
    tokens = list(range(12))
    row_s = (1.0 + 16 * 0.1) / 16
    assert drafter.owed([want(tokens, 3)]) == pytest.approx(11 * row_s)
    [draft] = drafter.draft([want(tokens, 3)])
    assert list(draft.tokens) == drafted(tokens, 3)
    now += 1000
    assert drafter.measure() and model.n_calls == calls + 4
    more = [*tokens, *draft.tokens, 5, 6, 7, 8]
    assert drafter.owed([want(more, 3)]) == pytest.approx(4 * row_s), "the last token is never stored"
    assert list(drafter.draft([want(more, 3)])[0].tokens) == drafted(more, 3)
    other = Want(0, 9, [1] * 5, [1] * 5, 3)
    assert drafter.owed([other]) == pytest.approx(4 * row_s), "another sequence shares no token"


class Timed(Cells):
    """Each row takes a second."""

    now = 0.0

    def best(self, rows: Sequence[Rows], summed: bool) -> tuple[np.ndarray, np.ndarray | None]:
        self.now += sum(len(row.tokens) for row in rows)
        return super().best(rows, summed)


def timed(step: int = 1) -> tuple[DraftModel, Timed]:
    model = Timed(n_ctx=2000, n_ubatch=64, step=step)
    drafter = DraftModel(model, 3, N_VOCAB, clock=lambda: model.now)
    drafter.measure()
    model.n_rows = 0
    return drafter, model


def test_a_long_prompt_is_skipped_unless_its_price_is_paid() -> None:
    drafter, model = timed()
    tokens = [(7 * i) % N_VOCAB for i in range(200)]
    least = SINK + SHORT
    assert drafter.owed([want(tokens, 2)]) == pytest.approx(least)
    [draft] = drafter.draft([want(tokens, 2)])
    assert list(draft.tokens) == drafted(tokens[:SINK] + tokens[-SHORT:], 2) and model.n_rows == least + 1
    more = [*tokens, *draft.tokens, 5]
    assert drafter.owed([want(more, 2)]) == 1, "the last drafted token is not computed"
    # The drafter may spend the time of the 199 missing tokens, which is enough for steps of 64 rows.
    draft = drafter.draft([want(more, 2)._replace(spend_s=199)])[0]
    while not draft.tokens:
        [draft] = drafter.draft([want(more, 2)._replace(spend_s=199)])
    assert list(draft.tokens) == drafted(more, 2)
    # After many more tokens, only the first tokens are stored. The drafter may spend time on the last `n`
    # tokens.
    later = [*more, *draft.tokens]
    for spend_s, n in ((0, least), (127, least), (128, 128)):
        later += tokens
        draft = drafter.draft([want(later, 2)._replace(spend_s=spend_s)])[0]
        while not draft.tokens:
            [draft] = drafter.draft([want(later, 2)._replace(spend_s=spend_s)])
        assert list(draft.tokens) == drafted(later[: len(more) + 1] + later[-n:], 2)


@pytest.mark.parametrize("step", [1, 4, 90])
@pytest.mark.parametrize("seed", range(3))
def test_any_text_costs_few_rows(seed: int, step: int) -> None:
    """Texts get accepted tokens or many other tokens at the end, lose tokens in the middle, or are
    replaced."""
    rng, (drafter, model) = random.Random(seed), timed(step)
    tokens, number = [1], 0
    for _ in range(60):
        kind = rng.randrange(6)
        tokens = tokens + [rng.randrange(N_VOCAB) for _ in range(rng.choice([1, 2, 20, 90]))]
        if kind == 0 and len(tokens) > 60:
            del tokens[9:50]
        elif kind == 1:
            tokens, number = tokens[: rng.randint(1, 99)], number + 1
        before, spend_s = model.n_rows, rng.choice([0, 0, 100])
        w = Want(0, number, tokens, tokens, 3, spend_s=spend_s)
        [draft] = drafter.draft([w])
        assert model.n_rows - before <= max(SINK + SHORT + 3, spend_s + 3)
        n_seen = len(model.cells[0]) - max(0, len(draft.tokens) - 1)
        assert len(draft.tokens) in (0, 3) and (not draft.tokens or n_seen <= len(tokens))
        if draft.tokens:
            seen = model.cells[0][:n_seen]
            assert list(draft.tokens) == drafted(seen, 3) and seen[-1] == tokens[-1]
            tokens = [*tokens, *draft.tokens[: rng.randint(0, 3)]]
