"""Drafts do not change the distribution of tokens, whether the drafts are right or wrong.

The test counts the third token of many short answers, whose exact probabilities follow from the fake runner's
logits. The third token comes from a step that verifies a draft.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from device_sets import only
from fake_runner import row_of
from scheduling import drafting, finish, make, tokens_of

from vkbackend.models.drafting.drafter import Draft, Want
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Generate
from vkbackend.models.sampling.params import SamplingParams

pytestmark = pytest.mark.no_vulkan

PROMPT = (3, 1, 4)
Weights = Callable[[np.ndarray, Sequence[int]], np.ndarray]


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def top_k(logits: np.ndarray, history: Sequence[int]) -> np.ndarray:
    kept = np.argsort(-logits)[:6]
    out = np.full(len(logits), -np.inf)
    out[kept] = logits[kept] / 1.3
    return softmax(out)


def min_p(logits: np.ndarray, history: Sequence[int]) -> np.ndarray:
    p = softmax(logits)
    return softmax(np.where(p >= 0.1 * p.max(), logits / 0.9, -np.inf))


def penalized(logits: np.ndarray, history: Sequence[int]) -> np.ndarray:
    out = logits.astype(np.float64)
    for token in set(history):
        out[token] = out[token] / 2.0 if out[token] > 0 else out[token] * 2.0
    kept = np.argsort(-out)[:8]
    rest = np.full(len(out), -np.inf)
    rest[kept] = out[kept]
    return softmax(rest)


OFF = {"top_p": 1.0, "min_p": 0.0, "top_k": 0}
CHAINS: dict[str, tuple[dict[str, float], Weights]] = {
    "top-k": ({**OFF, "top_k": 6, "temperature": 1.3}, top_k),
    "min-p": ({**OFF, "min_p": 0.1, "temperature": 0.9}, min_p),
    "penalties": ({**OFF, "top_k": 8, "temperature": 1.0, "repeat_penalty": 2.0}, penalized),
}


def third_tokens(weights: Weights) -> dict[int, float]:
    now: dict[tuple[int, ...], float] = {PROMPT: 1.0}
    for _ in range(3):
        after: dict[tuple[int, ...], float] = {}
        for history, chance in now.items():
            for token, p in enumerate(weights(row_of(history), history)):
                if p > 0:
                    after[(*history, token)] = after.get((*history, token), 0.0) + chance * p
        now = after
    total: dict[int, float] = {}
    for history, chance in now.items():
        total[history[-1]] = total.get(history[-1], 0.0) + chance
    return total


class Likely:
    """Drafts one of the three likeliest tokens, so that some drafts are right."""

    source, seconds, spent_s, stores = "likely", 0.0, 0.0, False

    def __init__(self) -> None:
        self._rng = random.Random(1)
        self.n_accepted = self.n_drafted = 0

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        drafts = []
        for want in wants:
            best = np.argsort(-row_of(want.tokens))[:3]
            drafts.append(Draft([int(self._rng.choice(list(best))) for _ in range(want.n)], self.source))
            self.n_drafted += 1
        return drafts

    def took(self, slot: int, n_accepted: int) -> None:
        self.n_accepted += n_accepted

    def close(self) -> None: ...


@pytest.mark.parametrize("chain", only(CHAINS, "top-k", "penalties"))
def test_the_distribution_is_unchanged(chain: str, request: pytest.FixtureRequest) -> None:
    n = 10_000 if request.config.getoption("--all") else 600
    options, weights = CHAINS[chain]
    drafter = Likely()
    _, runner = make(n_slots=4, n_queue=n, drafter=drafter)
    engine = Engine(runner, None, drafting(runner, drafter))  # type: ignore[arg-type]
    requests = [
        Generate(i, PROMPT, 4, SamplingParams(seed=i, **options))  # type: ignore[arg-type]
        for i in range(n)
    ]
    done = finish(engine, requests, 10 * n)
    counts = Counter(tokens_of(done[i])[2] for i in range(n))
    expected = third_tokens(weights)
    assert sum(expected.values()) == pytest.approx(1.0) and set(counts) <= set(expected)
    assert drafter.n_accepted > 0.1 * drafter.n_drafted and drafter.n_accepted < 0.9 * drafter.n_drafted
    frequent = [token for token, p in expected.items() if n * p >= 5]
    rest = n - sum(counts[token] for token in frequent), n * (1 - sum(expected[t] for t in frequent))
    terms = [(counts[t] - n * expected[t]) ** 2 / (n * expected[t]) for t in frequent]
    terms += [(rest[0] - rest[1]) ** 2 / rest[1]] if rest[1] >= 5 else []
    # The mean of chi-square equals the degrees of freedom, and its variance is twice as large. Less than one
    # of 10,000 seeds exceeds the mean by five standard deviations.
    freedom = len(terms) - 1
    assert sum(terms) < freedom + 5 * (2 * freedom) ** 0.5, (sum(terms), freedom)
