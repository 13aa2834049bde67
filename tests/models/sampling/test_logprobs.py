import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkbackend.errors import InvalidArgument, VkbackendError
from vkbackend.models.sampling.logprobs import logprobs_of
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.models.sampling.sampler import Sampler

pytestmark = pytest.mark.no_vulkan


@given(
    logits=st.lists(st.floats(-90, 90, width=32), min_size=1, max_size=40),
    n_top=st.integers(0, 50),
    data=st.data(),
)
def test_logprobs(logits: list[float], n_top: int, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(logits) - 1))
    got = logprobs_of(np.array(logits, np.float32), token, n_top)
    total = math.log(math.fsum(math.exp(x - max(logits)) for x in logits)) + max(logits)
    assert got.logprob == pytest.approx(logits[token] - total, abs=1e-9)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:n_top]
    assert [i for i, _ in got.top] == order
    assert [x for _, x in got.top] == pytest.approx([logits[i] - total for i in order], abs=1e-9)


def test_logprobs_do_not_depend_on_the_samplers() -> None:
    logits = np.random.default_rng(0).normal(0, 2, 50).astype(np.float32)
    forced = {int(logits.argmin()): 100.0}
    params = SamplingParams(0.1, logprobs=2, repeat_penalty=2.0, logit_bias=forced, seed=1)
    sampler = Sampler(params)
    assert sampler.n_candidates([]) == 0
    token = sampler.sample(logits, [1, 2])
    assert token == logits.argmin() and sampler.logprobs == logprobs_of(logits, token, 2)


def test_processors_come_first_and_in_order() -> None:
    seen: list[Any] = []

    def lower(tokens: list[int], logits: np.ndarray) -> np.ndarray:
        seen.append((tokens, logits[3]))
        logits[3] = -np.inf
        return logits

    def raise_it(tokens: list[int], logits: np.ndarray) -> np.ndarray:
        seen.append((tokens, logits[3]))
        return np.where(np.arange(len(logits)) == 2, 9.0, logits)

    logits = np.array([0, 1, 2, 5], np.float32)
    sampler = Sampler(SamplingParams(0, logits_processors=[lower, raise_it]))
    assert sampler.sample(logits, [7]) == 2
    assert seen == [([7], 5), ([7], -np.inf)] and logits[3] == 5


def test_a_failing_processor_is_named() -> None:
    def fail(tokens: list[int], logits: np.ndarray) -> np.ndarray:
        raise KeyError("x")

    def cut(tokens: list[int], logits: np.ndarray) -> np.ndarray:
        return logits[1:]

    def keep(tokens: list[int], logits: np.ndarray) -> np.ndarray:
        return logits

    for bad, said in (
        (fail, r"\[1\] failed: KeyError\('x'\)"),
        (cut, r"\[1\] returned an array of shape \(3,\)"),
    ):
        with pytest.raises(VkbackendError, match=said):
            Sampler(SamplingParams(0, logits_processors=[keep, bad])).sample(np.zeros(4, np.float32), [])
    for wrong in (3, [3], keep):
        with pytest.raises(InvalidArgument, match="logits_processors"):
            SamplingParams(logits_processors=wrong)  # type: ignore[arg-type]


def test_logprobs_of_the_candidates_that_remain() -> None:
    logits = np.log(np.array([0.1, 0.5, 0.3, 0.1], np.float32))
    sampler = Sampler(
        SamplingParams(1.0, top_k=2, top_p=1, min_p=0, logprobs=5, post_sampling_probs=True, seed=3)
    )
    token = sampler.sample(logits, [])
    assert sampler.logprobs is not None
    shown = {i: math.exp(x) for i, x in sampler.logprobs.top}
    assert shown == pytest.approx({1: 0.625, 2: 0.375}) and math.exp(sampler.logprobs.logprob) == shown[token]
    greedy = Sampler(SamplingParams(0, logprobs=1, post_sampling_probs=True))
    assert greedy.sample(logits, []) == 1 and greedy.logprobs is not None and greedy.logprobs.logprob == 0


@pytest.mark.parametrize(
    "filters",
    [
        {"top_p": 0.01},
        {"min_p": 0.99},
        {"typical_p": 0.01},
        {"xtc_probability": 1.0, "xtc_threshold": 1e-9},
        {"samplers": "top_k;top_p", "top_k": 4, "top_p": 0.01},
    ],
)
def test_min_keep(filters: dict[str, Any]) -> None:
    logits = np.random.default_rng(1).normal(0, 2, 50).astype(np.float32)
    names = "top_p;min_p;typ_p;xtc" if "samplers" not in filters else filters["samplers"]
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}

    def n_left(min_keep: int) -> int:
        params = SamplingParams(
            1.0, **{**off, **filters, "samplers": names}, min_keep=min_keep, logprobs=50,
            post_sampling_probs=True, seed=1,
        )  # fmt: skip
        sampler = Sampler(params)
        sampler.sample(logits, [])
        assert sampler.logprobs is not None
        return len(sampler.logprobs.top)

    assert n_left(0) < 4 and (n_left(4) == 4 or "xtc_probability" in filters) and n_left(4) >= 4
