"""The number of rows depends on measured times and learned acceptance."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkbackend.models.drafting.acceptance import Acceptance, expected_tokens
from vkbackend.models.drafting.prices import FEW, GAIN, REFRESH, StepPrices, best_length, best_lengths

pytestmark = pytest.mark.no_vulkan

FLAT = {1: 1.0, 2: 1.03, 4: 1.06, 8: 1.1}  # a GPU, across devices
STEEP = {1: 1.0, 2: 1.41, 4: 2.37, 8: 3.94}  # lavapipe, two devices


def priced(times: dict[int, float]) -> StepPrices:
    prices = StepPrices()
    for rows, seconds in times.items():
        for time in (100.0, seconds, seconds, seconds):
            prices.learn(rows, time)
    return prices


@pytest.mark.parametrize(
    ("times", "rate", "expected"),
    [
        (FLAT, 0.9, 7),
        (FLAT, 0.3, 3),
        (FLAT, 0.02, 0),
        (STEEP, 0.8, 1),
        (STEEP, 0.9, 3),
        (STEEP, 0.97, 7),
        (STEEP, 0.4, 0),
    ],
)
def test_one_draft(times: dict[int, float], rate: float, expected: int) -> None:
    survivals = [[rate ** (j + 1) for j in range(7)]]
    assert best_lengths(1, 1, survivals, priced(times), 8) == [expected]


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=4), st.booleans(), st.integers(2, 8))
def test_the_value_is_the_best_of_all_lengths(rates: list[float], flat: bool, most: int) -> None:
    prices, n = priced(FLAT if flat else STEEP), len(rates)
    most = max(most, n)
    survivals = [[rate ** (j + 1) for j in range(7)] for rate in rates]

    def value(lengths: tuple[int, ...]) -> float:
        tokens = n + sum(sum(draft[:k]) for draft, k in zip(survivals, lengths, strict=True))
        return tokens / prices.known(n + sum(lengths)) / (GAIN if any(lengths) else 1.0)

    chosen = best_lengths(n, n, survivals, prices, most)
    every = (k for k in itertools.product(range(8), repeat=n) if n + sum(k) <= most)
    assert value(tuple(chosen)) == pytest.approx(max(map(value, every)))


def test_padding_is_filled() -> None:
    """Three sequences are computed in four rows, so one drafted token is free."""
    survivals = [[0.1], [0.2], [0.05]]
    assert best_lengths(3, 3, survivals, priced({4: 1.0, 8: 9.0}), 8) == [0, 1, 0]


def test_a_draft_is_tried_where_none_pays() -> None:
    survivals = [[0.01, 0.0]]
    assert best_lengths(1, 1, survivals, priced(STEEP), 8) == [0]
    assert best_lengths(1, 1, survivals, priced(STEEP), 8, tries=True) == [1]
    assert best_lengths(8, 8, [[0.9]] * 8, priced(FLAT), 8, tries=True) == [0] * 8


def test_all_step_sizes_are_tried_within_a_few_steps() -> None:
    """Unmeasured steps are assumed to be cheap. After trying all sizes, the choice is the same as with known
    times."""
    prices, chosen = StepPrices(), []
    for _ in range(14):
        [n] = best_lengths(1, 1, [[0.8 ** (j + 1) for j in range(7)]], prices, 8)
        chosen.append(n)
        prices.learn(1 + n, STEEP[1 + n])
    assert chosen[:2] == [0, 0] and set(chosen) == {0, 1, 3, 7} and chosen[8:] == [1] * 6


def test_slow_steps_are_ignored_and_old_times_measured_again() -> None:
    """While drafts save time, a step whose time is old is assumed to be fast. If drafts save no time, such a
    step is measured again, unless drafts would save no time even with a fast step."""
    prices = priced(STEEP)
    prices.learn(2, 100.0)
    assert prices.seconds(2) == 1.41
    for _ in range(REFRESH):
        prices.learn(1, 1.0)
        prices.learn(2, 1.41)
    assert prices.is_old(8) and not prices.is_old(2)
    assert prices.seconds(8) == 3.94 and prices.seconds(8, hopeful=True) == pytest.approx(1.41 * 1.18)
    survivals = [[0.8 ** (j + 1) for j in range(7)]]
    assert best_lengths(1, 1, survivals, prices, 8) == [7]
    wrong = [[0.01] * 7]
    assert best_lengths(1, 1, wrong, prices, 8) == [0]
    assert best_lengths(1, 1, wrong, prices, 8, tries=True) == [1]
    half = [[0.44 ** (j + 1) for j in range(7)]]
    assert best_lengths(1, 1, half, prices, 8) == [0]
    assert best_lengths(1, 1, half, prices, 8, tries=True) == [3]
    for rows in (4, 8):
        prices.learn(rows, 2 * STEEP[rows])
    assert prices.seconds(8) == 2 * STEEP[8], "the new time replaces the old ones"
    assert best_lengths(1, 1, survivals, prices, 8) == [1]


def test_the_first_time_of_a_size_counts_unless_it_is_longer_than_steps_of_one_row() -> None:
    prices = StepPrices()
    for seconds in (9.0, 1.0):
        prices.learn(1, seconds)
    prices.learn(2, 1.9)
    prices.learn(4, 4.1)
    assert prices.seconds(2) == 1.9 and not prices.is_measured(4)


def test_a_time_measured_under_load_is_corrected() -> None:
    """If all steps verify drafts, no step of one row is measured. The time of a larger step is then an upper
    bound of its time."""
    prices = priced({1: 10.0, 2: 11.0})
    for _ in range(5):
        prices.learn(2, 1.5)
    assert prices.seconds(1) == 1.5 and best_lengths(1, 1, [[0.4]], prices, 2) == [1]
    assert best_length(1, 1, 0.4, prices, 2, 0.7).n == 0


def test_a_size_with_few_times_is_not_cheaper_than_smaller_sizes() -> None:
    """Steps of one row were measured under load, and a step of two rows without load."""
    prices = StepPrices()
    for _ in range(40):
        prices.learn(1, 2.0)
    prices.learn(2, 1.5)
    assert prices.seconds(1) == 2.0 and prices.seconds(2) == pytest.approx(2.06)
    for _ in range(FEW):
        prices.learn(2, 1.5)
    assert prices.seconds(1) == prices.seconds(2) == 1.5


def test_an_expensive_drafter_drafts_less() -> None:
    prices = priced(FLAT)
    lengths = [best_length(1, 1, 0.7, prices, 8, seconds).n for seconds in (0.0, 0.1, 0.3, 1.0)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] >= 5 and lengths[-1] == 0
    assert best_length(3, 3, 0.9, prices, 8, 0.0).n == 1, "three drafts of two tokens exceed 8 rows"


def test_acceptance_is_learned_by_source_and_shared_with_new_sequences() -> None:
    common = Acceptance()
    first = Acceptance(common)
    assert first.rate("ngram-6") == 0.8 and first.rate("ngram-3") == 0.5
    for _ in range(50):
        first.learn("ngram-3", 7, 0)
    assert first.rate("ngram-3") < 0.05 and first.rate("ngram-6") == 0.8
    assert Acceptance(common).rate("ngram-3") < 0.06
    for _ in range(60):
        first.learn("ngram-3", 3, 3)
    assert first.rate("ngram-3") > 0.9


def test_the_learned_rate_is_the_rate() -> None:
    rng, acceptance = random.Random(1), Acceptance()
    rates = []
    for _ in range(2000):
        n = next((j for j in range(7) if rng.random() > 0.7), 7)
        acceptance.learn("x", 7, n)
        rates.append(acceptance.rate("x"))
    assert sum(rates[50:]) / len(rates[50:]) == pytest.approx(0.7, abs=0.03)


def test_expected_tokens() -> None:
    assert expected_tokens(0.5, 3) == pytest.approx((1 - 0.5**4) / 0.5) and expected_tokens(1, 7) == 8


def test_drafts_are_short_until_some_were_accepted() -> None:
    common = Acceptance()
    first, second = Acceptance(common), Acceptance(common)
    assert first.limit("draft") == 1
    for _ in range(20):
        first.learn("draft", 1, 0)
    assert first.limit("draft") == second.limit("draft") == 1
    first.learn("draft", 1, 1)
    assert first.limit("draft") == second.limit("draft") == 3 and second.limit("mtp") == 1
    first.learn("draft", 3, 3)
    assert second.limit("draft") >= 7, "sequences begin with the limit of all"
