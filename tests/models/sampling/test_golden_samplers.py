"""Every sampler agrees with llama.cpp on the remaining tokens, their probabilities and the drawn tokens."""

import json
import math
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from device_sets import some
from oracles.sampler_cases import CASES, distribution, params
from places import GOLDEN

from vkbackend.models.sampling.candidates import Candidates
from vkbackend.models.sampling.params import ORDER
from vkbackend.models.sampling.sampler import Sampler

pytestmark = pytest.mark.no_vulkan

FOUND = json.loads((GOLDEN / "samplers.json").read_text(encoding="utf-8"))
# llama.cpp computes in float32, and the file stores 6 digits.
TOLERANCE = 5e-6


def of_case(name: str) -> list[dict[str, Any]]:
    return [case for case in FOUND["chains"] if case["case"] == name]


CHAINS = sorted({chain["case"] for chain in FOUND["chains"]})


def test_every_sampler_has_a_case() -> None:
    assert set(CHAINS) == {name for name, options in CASES.items() if not params(options).mirostat}
    used = {name for case in CHAINS for name in params(CASES[case]).chain}
    assert used == set(ORDER)


@pytest.mark.parametrize("case", CHAINS)
def test_the_same_tokens_are_left(case: str) -> None:
    for chain in of_case(case):
        left = {int(token): q for token, q in chain["left"].items()}
        ours = distribution(params(CASES[case]), np.array(chain["logits"], np.float32), chain["history"])
        assert set(ours) == set(left)
        assert max(abs(ours[token] - q) for token, q in left.items()) < TOLERANCE


@pytest.mark.parametrize("case", some(CHAINS, 3))
def test_draws_follow_the_probabilities(case: str) -> None:
    chain, n = of_case(case)[0], 1_000
    sampler, logits = Sampler(params(CASES[case])), np.array(chain["logits"], np.float32)
    drawn = np.bincount([sampler.sample(logits, chain["history"]) for _ in range(n)], minlength=len(logits))
    expected = np.zeros(len(logits))
    for token, q in chain["left"].items():
        expected[int(token)] = q * n
    assert drawn[expected == 0].sum() == 0
    often = expected >= 5
    observed = np.append(drawn[often], drawn[~often].sum())
    wanted = np.append(expected[often], max(expected[~often].sum(), 1e-9))
    freedom = max(1, np.count_nonzero(often))
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("run", FOUND["mirostat"], ids=lambda run: f"version {run['options']['mirostat']}")
def test_mirostat_keeps_the_same_tokens_while_it_learns(run: dict[str, Any]) -> None:
    sampler = Sampler(params(run["options"]))
    sizes = set()
    for step in run["steps"]:
        c = Candidates.of_row(np.array(step["logits"], np.float32).astype(np.float64))
        for apply in sampler._chain:
            apply(c, [])
        sampler._mirostat.cut(c)
        assert sorted(c.ids.tolist()) == step["left"]
        sizes.add(len(c))
        sampler._mirostat.learn(float(c.probabilities()[c.ids.tolist().index(step["drawn"])]))
    assert len(sizes) > 3


@pytest.mark.oracle
def test_stored_results_equal_the_installed_llama_cpp() -> None:
    if find_spec("xllamacpp") is None:
        pytest.skip("needs xllamacpp")
    from oracles import make_samplers

    assert make_samplers.chains() == FOUND["chains"]
    again = make_samplers.mirostats()
    assert [[step["left"] for step in run["steps"]] for run in again] == [
        [step["left"] for step in run["steps"]] for run in FOUND["mirostat"]
    ]
