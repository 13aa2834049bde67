"""The sampler returns the same results as a simple chain that sorts all tokens."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from counted_calls import counted_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import examples

from vkbackend.errors import InvalidArgument, VkbackendError
from vkbackend.models.sampling.candidates import Candidates
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.models.sampling.sampler import Sampler

OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def distribution(logits: np.ndarray, history: list[int], p: SamplingParams) -> dict[int, float]:
    scores = {i: float(x) for i, x in enumerate(logits)}
    if p.repeat_last_n:
        for token in set(history[-p.repeat_last_n :]):
            x = scores[token]
            scores[token] = x / p.repeat_penalty if x > 0 else x * p.repeat_penalty
    line = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    if p.top_k:
        line = line[: p.top_k]
    peak = line[0][1]
    if p.top_p < 1:
        weights = [math.exp(x - peak) for _, x in line]
        reached, kept = 0.0, 0
        while kept < len(line) and reached < p.top_p * sum(weights):
            reached += weights[kept]
            kept += 1
        line = line[: max(1, kept)]
    if p.min_p > 0:
        line = [(i, x) for i, x in line if math.exp(x - peak) >= p.min_p]
    weights = [math.exp((x - peak) / p.temperature) for _, x in line]
    return {i: w / sum(weights) for (i, _), w in zip(line, weights, strict=True)}


def draw(n: int, logits: np.ndarray, history: list[int], **params: Any) -> Counter[int]:
    sampler = Sampler(SamplingParams(**params))
    return Counter(sampler.sample(logits, history) for _ in range(n))


def kept(params: SamplingParams, scores: np.ndarray) -> np.ndarray:
    sampler, c = Sampler(params), Candidates.of_row(scores.astype(np.float64))
    for step in sampler._chain:
        step(c, [])
    return c.ids


PARAMS = [
    {},
    {**OFF, "temperature": 1.5},
    {**OFF, "top_k": 3},
    {**OFF, "top_p": 0.7},
    {**OFF, "top_p": 0.0},
    {**OFF, "min_p": 0.3},
    {**OFF, "min_p": 1.0},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.1, "temperature": 0.5},
    {"repeat_penalty": 1.8, "repeat_last_n": 4, "temperature": 1.2},
    {"repeat_penalty": 0.5, "repeat_last_n": 100, **OFF},
    {"repeat_penalty": 3.0, "repeat_last_n": 0, **OFF},
]


@pytest.mark.parametrize("params", PARAMS, ids=repr)
def test_frequencies(params: dict[str, Any]) -> None:
    logits = np.random.default_rng(5).normal(0, 2, 40).astype(np.float32)
    history = [int(logits.argmax()), 3, 7, 7, 11]
    n = examples(8_000)
    expected = distribution(logits, history, SamplingParams(seed=0, **params))
    drawn = draw(n, logits, history, seed=1, **params)
    assert set(drawn) <= set(expected)
    for token, p in expected.items():
        assert abs(drawn[token] - n * p) <= 5 * math.sqrt(n * p * (1 - p)) + 1, (token, drawn[token], n * p)


@settings(max_examples=examples(150), deadline=None)
@given(
    logits=st.lists(st.integers(-8, 8), min_size=1, max_size=60),
    top_k=st.integers(0, 70),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)
def test_kept_tokens(logits: list[int], top_k: int, top_p: float, min_p: float) -> None:
    params = SamplingParams(1.0, top_k, top_p, min_p, seed=0)
    scores = np.array(logits, np.float64)
    ids = kept(params, scores)
    expected = set(distribution(scores, [], params))
    assert len(set(ids.tolist()) ^ expected) <= (0 < top_p < 1)
    assert len(ids) == len(set(ids.tolist())) >= 1


def test_greedy_takes_the_best_after_the_penalty_and_the_lowest_id_on_ties() -> None:
    greedy = Sampler(SamplingParams(temperature=0))
    assert greedy.sample(np.array([1, 5, 5, 2], np.float32), []) == 1
    penalized = Sampler(SamplingParams(temperature=0, repeat_penalty=2.0, repeat_last_n=1))
    assert penalized.sample(np.array([1, 5, 4, 2], np.float32), [2, 1]) == 2
    assert penalized.sample(np.array([1, 5, 4, 2], np.float32), [1, 2]) == 1
    assert penalized.sample(np.array([-1, -1.5, -9, -9], np.float32), [0]) == 1


def test_tiny_temperature_is_greedy_without_overflow() -> None:
    logits = np.array([3.0, 3.5, -1e4], np.float32)
    with np.errstate(invalid="raise", divide="raise"):
        assert draw(50, logits, [], temperature=1e-300, seed=1, **OFF) == {1: 50}


def test_logits_are_not_changed() -> None:
    logits = np.array([3.0, 2.0, 1.0], np.float32)
    Sampler(SamplingParams(repeat_penalty=2.0)).sample(logits, [0, 1])
    assert logits.tolist() == [3.0, 2.0, 1.0]


def test_a_seed_repeats_the_run() -> None:
    logits = np.random.default_rng(0).normal(size=500).astype(np.float32)

    def run(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(1.0, seed=seed))
        return [sampler.sample(logits, []) for _ in range(30)]

    assert run(7) == run(7) != run(8)
    assert SamplingParams().seed != SamplingParams().seed


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_raise(bad: float, temperature: float) -> None:
    logits = np.zeros(100, np.float32)
    logits[50] = bad
    with pytest.raises(VkbackendError, match=r"the largest logit is (nan|inf)"):
        Sampler(SamplingParams(temperature)).sample(logits, [])
    with pytest.raises(VkbackendError, match="the largest logit is -inf"):
        Sampler(SamplingParams(temperature)).sample(np.full(100, -np.inf, np.float32), [])


def test_masked_logits_are_never_drawn() -> None:
    logits = np.full(100, -np.inf, np.float32)
    logits[[3, 9]] = 1.0
    assert set(draw(200, logits, [], seed=1, **OFF)) == {3, 9}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in ("temperature", "top_p", "min_p", "repeat_penalty")
     for value in (-0.1, -1, math.nan, math.inf, -math.inf, "x", None, True)]
    + [(name, value) for name in ("top_k", "repeat_last_n", "seed")
       for value in (-2, 1.5, math.nan, "3", False)]
    + [("top_p", 1.01), ("min_p", 2), ("repeat_penalty", 0), ("top_k", 1 << 40), ("seed", 1 << 64)],
)  # fmt: skip
def test_bad_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=name):
        SamplingParams(**{name: value})


def test_numpy_numbers_are_numbers() -> None:
    params = SamplingParams(np.float32(0.5), np.int64(3), seed=np.uint32(4))  # type: ignore[arg-type]
    assert (params.temperature, params.top_k, params.seed) == (0.5, 3, 4)


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 0}, {"top_k": 0, "min_p": 0.0}, {"temperature": 0}], ids=repr
)
def test_large_vocabularies_take_few_steps(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler sorts at most a third of 152k tokens, and makes as many Python calls as for 1,000
    tokens."""
    n_sorted, sort = [0], np.argsort

    def argsort(values: np.ndarray, **how: Any) -> np.ndarray:
        n_sorted.append(len(values))
        return sort(values, **how)

    monkeypatch.setattr(np, "argsort", argsort)
    calls = []
    for n_vocab in (1_000, 151_936):
        logits = np.random.default_rng(0).normal(0, 3, n_vocab).astype(np.float32)
        sampler = Sampler(SamplingParams(seed=1, **params))
        with counted_calls() as counted:
            sampler.sample(logits, [1, 2, 3])
        calls.append(counted.total())
    assert max(n_sorted) < 151_936 / 3
    assert calls[0] == calls[1] > 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(0, seed=3),
        SamplingParams(0.8, top_k=1, seed=3),
        SamplingParams(1.5, top_k=20, top_p=0.7, min_p=0.0, seed=3),
        SamplingParams(0.5, top_k=40, top_p=1.0, min_p=0.1, seed=3),
    ],
    ids=repr,
)
def test_candidates_and_all_logits_choose_the_same(params: SamplingParams) -> None:
    rng = np.random.default_rng()
    whole, part = Sampler(params), Sampler(params)
    for _ in range(200):
        logits = rng.normal(0, 3, 500).astype(np.float32).round(1)
        ids = np.argsort(-logits, kind="stable")[: max(params.n_candidates, 1) + 7]
        assert part.choose(ids, logits[ids]) == whole.sample(logits, [])


def test_a_penalty_needs_more_candidates() -> None:
    """The sampler needs one more candidate for each token whose logit a penalty lowers. Samplers that may
    raise logits need complete rows."""

    def wanted(history: list[int], *args: Any, **params: Any) -> int:
        return Sampler(SamplingParams(*args, **params)).n_candidates(history)

    assert wanted([3, 5, 3], 0, repeat_penalty=1.1) == 3
    assert wanted([3, 5, 3], 0, repeat_penalty=1.1, repeat_last_n=0) == 1
    assert wanted([3, 5, 3], 0.8, presence_penalty=0.1, logit_bias={7: -1, 5: -1}) == 43
    assert wanted([3, 5, 3, 5], 0.8, dry_multiplier=1, dry_sequence_breakers=[]) == 41
    assert wanted([], 0.8, top_k=0) == 0 < wanted([], 0.8) == 40
    for params in ({"repeat_penalty": 0.9}, {"presence_penalty": -1}, {"logit_bias": {3: 0.5}},
                   {"mirostat": 1}, {"top_n_sigma": 1.0}, {"samplers": "top_p;top_k"}):  # fmt: skip
        assert wanted([3], 0.8, **params) == 0


def test_no_candidate_is_finite() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(VkbackendError, match="largest logit"):
            Sampler(SamplingParams(0.8)).choose(np.array([4, 5]), np.array([bad, 1.0], np.float32))


@pytest.mark.parametrize("name", [["top_k"], {"top_k": 1}, None, 1, "best"])
def test_invalid_sampler_names(name: object) -> None:
    with pytest.raises(InvalidArgument, match="not a sampler; there are: penalties"):
        SamplingParams(samplers=["top_p", name])  # type: ignore[arg-type]


def test_dry_after_a_rejected_draft() -> None:
    """The number of candidates is computed for drafted tokens, and these tokens may be rejected."""
    params = SamplingParams(temperature=0, dry_multiplier=5.0, dry_allowed_length=1, dry_sequence_breakers=())
    sampler, fresh = Sampler(params), Sampler(params)
    logits = np.linspace(1, 0, 50, dtype=np.float32)
    ids = np.arange(50)
    sampler.n_candidates([1, 2, 0, 1, 2], [0, 1, 2])
    for history in ([1, 2, 0, 1, 2], [1, 2, 0, 1, 2, 3], [1, 2, 0, 1, 2, 3, 1]):
        assert sampler.choose(ids, logits, history) == fresh.choose(ids, logits, history)
    penalized = [1, 2, 0, 1, 2, 0]
    assert sampler.n_candidates([1, 2, 0, 1, 2], [0]) >= fresh.n_candidates(penalized)
