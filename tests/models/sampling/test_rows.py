import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from counted_calls import counted_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import examples

from vkbackend.errors import VkbackendError
from vkbackend.models.sampling import rows
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.models.sampling.rows import TOGETHER, choose_rows
from vkbackend.models.sampling.sampler import Sampler

pytestmark = pytest.mark.no_vulkan

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 1e-300, 0.3, 0.8, 2.0]),
    top_k=st.sampled_from([1, 2, 5, 40]),
    top_p=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 9),
)


def candidates(n: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = -np.sort(-rng.normal(0, 3, (n, k)).astype(np.float32).round(1))
    logits[:, k // 2 :][rng.random((n, k - k // 2)) < 0.2] = -np.inf
    logits = -np.sort(-logits)
    return rng.permuted(np.tile(np.arange(k) * 7, (n, 1)), axis=1), logits


@settings(max_examples=examples(100), deadline=None)
@given(params=st.lists(PARAMS, min_size=1, max_size=24), k=st.integers(2, 64), seed=st.integers(0, 99))
def test_rows_choose_the_same_as_each_row_alone(params: list[SamplingParams], k: int, seed: int) -> None:
    together, alone = ([Sampler(p) for p in params] for _ in range(2))
    for step in range(4):
        ids, logits = candidates(len(params), k, seed * 7 + step)
        expected = [s.choose(ids[row], logits[row]) for row, s in enumerate(alone)]
        assert choose_rows(together, [[]] * len(params), ids, logits) == expected


def test_long_runs_agree() -> None:
    together, alone = ([Sampler(SamplingParams(seed=row)) for row in range(64)] for _ in range(2))
    for step in range(100):
        ids, logits = candidates(64, 40, step)
        expected = [s.choose(ids[row], logits[row]) for row, s in enumerate(alone)]
        assert choose_rows(together, [[]] * 64, ids, logits) == expected


@pytest.mark.parametrize("n", [2, TOGETHER + 3])
@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_row_fails_alone(n: int, temperature: float, bad: float) -> None:
    together, alone = ([Sampler(SamplingParams(temperature, seed=row)) for row in range(n)] for _ in range(2))
    for whole in (False, True):
        ids, logits = candidates(n, 40, 1)
        if whole:
            ids = np.tile(np.arange(40), (n, 1))
        logits[1, 0 if bad > 0 or bad != bad else slice(None)] = bad
        chosen = choose_rows(together, [[]] * n, None if whole else ids, logits)
        for row, sampler in enumerate(alone):
            if row == 1:
                assert isinstance(chosen[row], VkbackendError) and "largest logit" in str(chosen[row])
            else:
                assert chosen[row] == sampler.choose(ids[row], logits[row])


def test_calls_do_not_grow_with_the_rows() -> None:
    def calls(n: int, **params: Any) -> Counter[str]:
        samplers = [Sampler(SamplingParams(seed=row, **params)) for row in range(n)]
        ids, logits = candidates(n, 40, 0)
        with counted_calls() as counted:
            choose_rows(samplers, [[]] * n, ids, logits)
        of_others = {"random", "append", "gc_callback", "perf_counter"}
        return Counter({name: n for name, n in counted.items() if name not in of_others})

    assert calls(64) == calls(16)
    assert calls(64, temperature=0) == calls(1, temperature=0)


def test_greedy_rows_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    samplers = [Sampler(SamplingParams(0.8 if row % 3 else 0, seed=row)) for row in range(30)]
    drawn: list[int] = []
    whole = rows._draw

    def draw(samplers: Any, ids: np.ndarray, logits: np.ndarray) -> list[int]:
        drawn.append(len(ids))
        return whole(samplers, ids, logits)

    monkeypatch.setattr(rows, "_draw", draw)
    ids, logits = candidates(30, 40, 0)
    chosen = choose_rows(samplers, [[]] * 30, ids, logits)
    assert drawn == [20]
    assert chosen[::3] == ids[::3, 0].tolist()


@settings(max_examples=examples(60), deadline=None)
@given(
    params=st.lists(PARAMS, min_size=TOGETHER, max_size=24), v=st.integers(2, 300), seed=st.integers(0, 99)
)
def test_complete_rows_choose_the_same_as_each_row_alone(
    params: list[SamplingParams], v: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    together, alone = ([Sampler(p) for p in params] for _ in range(2))
    for step in range(4):
        logits = rng.normal(0, 3, (len(params), v)).astype(np.float32).round(1)
        logits[rng.random(logits.shape) < 0.1] = np.float32(-0.0)
        logits[rng.random(logits.shape) < 0.1] = -np.inf
        logits[:, 0] = 0.1
        if step == 3:
            logits[0, v - 1] = (np.nan, -np.nan, np.inf)[seed % 3]
        expected = [rows._tried(s.sample, row, ()) for s, row in zip(alone, logits, strict=True)]
        chosen = choose_rows(together, [()] * len(params), None, logits)
        assert [str(x) for x in chosen] == [str(x) for x in expected]


def test_the_best_of_rows_equal_a_stable_sort() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 2, (9, 500)).astype(np.float32).round(1)
    for k in (1, 2, 40, 499, 500, 600):
        ids, values = rows.best_of_rows(logits, k)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
        assert np.array_equal(ids, order) and np.array_equal(values, np.take_along_axis(logits, order, 1))
