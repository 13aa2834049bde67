import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import examples

from vkbackend.models.sampling import filters
from vkbackend.models.sampling.candidates import Candidates
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.models.sampling.penalties import Breakers, dry_penalties, penalize
from vkbackend.models.sampling.sampler import Sampler

pytestmark = pytest.mark.no_vulkan

LOGITS = st.lists(st.one_of(st.integers(-8, 8), st.just(-math.inf)), min_size=1, max_size=60).filter(
    lambda row: max(row) > -math.inf
)
HISTORY = st.lists(st.integers(0, 5), max_size=40)
SHARE = st.sampled_from([0.0, 0.01, 0.2, 0.5, 0.9, 0.999, 1.0])


def whole(logits: list[float]) -> Candidates:
    return Candidates.of_row(np.array(logits, np.float64))


def sorted_(logits: list[float]) -> Candidates:
    c = whole(logits)
    c.order()
    return c


FILTERS: dict[str, Any] = {
    "top_k": lambda c, x: filters.top_k(c, 1 + int(x * 20)),
    "top_p": filters.top_p,
    "min_p": lambda c, x: filters.min_p(c, max(x, 1e-9)),
    "typical": filters.typical,
    "top_n_sigma": lambda c, x: filters.top_n_sigma(c, x * 3),
    "xtc": lambda c, x: filters.xtc(c, 1.0, x / 2, np.random.default_rng(0)),
}


@pytest.mark.parametrize("name", FILTERS)
@settings(max_examples=examples(60), deadline=None)
@given(logits=LOGITS, x=SHARE, shift=st.integers(-3, 3))
def test_filters(name: str, logits: list[float], x: float, shift: int) -> None:
    """All filters except XTC and typical keep the best token."""
    left = []
    for c in (whole(logits), sorted_(logits), whole([v + shift for v in logits])):
        FILTERS[name](c, x)
        finite = c.scores > -np.inf
        left.append(set(c.ids[finite].tolist()))
        assert finite.any() and len(set(c.ids.tolist())) == len(c)
        assert name in ("typical", "xtc") or c.peak in (max(logits), max(logits) + shift)
        if c.ordered:
            assert (c.scores[1:] <= c.scores[:-1]).all()
    first = whole(logits)
    FILTERS[name](first, x)
    assert all(first.scores[i] in (logits[t], -math.inf) for i, t in enumerate(first.ids.tolist()))
    assert all(len(left[0] ^ other) <= (name in ("top_p", "typical")) for other in left[1:])


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "top_n_sigma"])
@settings(max_examples=examples(60), deadline=None)
@given(logits=LOGITS, a=SHARE, b=SHARE)
def test_a_larger_parameter_keeps_more(name: str, logits: list[float], a: float, b: float) -> None:
    kept = []
    for x in sorted([a, b], reverse=name == "min_p"):
        c = whole(logits)
        FILTERS[name](c, x)
        kept.append(set(c.ids[c.scores > -np.inf].tolist()))
    assert kept[0] <= kept[1]


def plain_dry(
    window: list[int], multiplier: float, base: float, allowed: int, breakers: Breakers
) -> dict[int, float]:
    n, limit = len(window), len(window)
    for i in range(n):
        tails = breakers.get(window[n - 1 - i], ())
        matches = [t for t in tails if len(t) <= i and tuple(window[n - i :][: len(t)]) == t]
        if matches:
            limit = i - max(map(len, matches))
            break
    longest: dict[int, int] = {}
    for end in range(n - 1):
        length = 0
        while length < min(limit, end + 1) and window[end - length] == window[n - 1 - length]:
            length += 1
        if length >= allowed and n > allowed and limit >= allowed:
            longest[window[end + 1]] = max(length, longest.get(window[end + 1], 0))
    return {t: multiplier * base ** (length - allowed) for t, length in longest.items()
            if () not in breakers.get(t, ())}  # fmt: skip


@settings(max_examples=examples(300), deadline=None)
@given(
    window=HISTORY,
    allowed=st.integers(0, 4),
    breakers=st.dictionaries(
        st.integers(0, 5),
        st.lists(st.lists(st.integers(0, 5), max_size=2).map(tuple), min_size=1),
        max_size=2,
    ),
)
def test_dry_follows_the_definition(window: list[int], allowed: int, breakers: Breakers) -> None:
    assert dry_penalties(window, 0.8, 1.75, allowed, breakers) == plain_dry(
        window, 0.8, 1.75, allowed, breakers
    )


def test_dry_of_long_repetitions_is_bounded() -> None:
    """The exponent of the penalty is limited so that float32 does not overflow. If the base is 1.75, the
    exponent is at most 158."""
    assert dry_penalties([7] * 20_000, 1.0, 1.75, 2, {}) == {7: 1.75**158}
    assert dry_penalties([7] * 20_000, 2.0, 1.0, 2, {}) == {7: 2.0}


@settings(max_examples=examples(100), deadline=None)
@given(logits=LOGITS, history=HISTORY, keep=st.integers(1, 60))
def test_penalties_of_candidates_equal_penalties_of_the_row(
    logits: list[float], history: list[int], keep: int
) -> None:
    row = [*logits, *[0.0] * 6]
    every, some = whole(row), sorted_(row)
    some.keep(slice(keep))
    for c in (every, some):
        penalize(c, history, 1.3, 0.2, 0.1)
    assert (every.scores[some.ids] == some.scores).all()


@settings(max_examples=examples(200), deadline=None)
@given(
    seed=st.integers(0, 999),
    history=HISTORY,
    options=st.fixed_dictionaries({
        "temperature": st.sampled_from([0.0, 0.7, 1.5]), "top_k": st.sampled_from([1, 3, 20]),
        "repeat_penalty": st.sampled_from([1.0, 1.3]), "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "dry_multiplier": st.sampled_from([0.0, 0.8]), "typical_p": st.sampled_from([0.6, 1.0]),
        "xtc_probability": st.sampled_from([0.0, 0.5]), "dynatemp_range": st.sampled_from([0.0, 0.4]),
        "logit_bias": st.sampled_from([{}, {0: -math.inf, 3: -1.5}]), "min_tokens": st.sampled_from([0, 2]),
    }),
)  # fmt: skip
def test_the_most_likely_tokens_decide_like_complete_rows(
    seed: int, history: list[int], options: dict[str, Any]
) -> None:
    params = SamplingParams(seed=seed, stop_token_ids=[1, 2], dry_sequence_breakers=[[4]], **options)
    part, every = Sampler(params), Sampler(params)
    rng, tokens = np.random.default_rng(seed), list(history)
    for _ in range(5):
        logits = rng.normal(0, 2, 80).astype(np.float32).round(1)
        logits[:6] += 3
        n = part.n_candidates(tokens)
        token = every.sample(logits, tokens)
        if n:
            ids = np.argsort(-logits, kind="stable")[:n]
            assert part.choose(ids, logits[ids], tokens) == token
        else:
            assert part.sample(logits, tokens) == token
        tokens.append(token)
