"""Cases for vkbackend's sampler and llama.cpp's: options, logits, history."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from vkbackend.models.sampling.candidates import Candidates
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.models.sampling.penalties import subtract
from vkbackend.models.sampling.sampler import Sampler

OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "dry_sequence_breakers": [], "seed": 1}
DRY = {"dry_multiplier": 0.8}

# The cases have single samplers first, then combinations. XTC's probability is 1. No case runs top-n-sigma
# before typical, because llama.cpp would then sort NaN.
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 1.7},
    "temperature, low": {"temperature": 0.2},
    "greedy": {"temperature": 0.0},
    "dynamic temperature": {"temperature": 1.0, "dynatemp_range": 0.7},
    "dynamic temperature, squared": {"temperature": 0.6, "dynatemp_range": 0.8, "dynatemp_exponent": 2.0},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.8},
    "top-p, none": {"top_p": 0.0},
    "min-p": {"min_p": 0.07},
    "typical": {"typical_p": 0.6},
    "top-n-sigma": {"top_n_sigma": 1.2},
    "XTC": {"xtc_probability": 1.0, "xtc_threshold": 0.06},
    "repetition": {"repeat_penalty": 1.4},
    "repetition, of 5": {"repeat_penalty": 1.4, "repeat_last_n": 5},
    "presence": {"presence_penalty": 0.6, "repeat_last_n": -1},
    "frequency": {"frequency_penalty": 0.3, "repeat_last_n": -1},
    "all penalties": {"repeat_penalty": 0.8, "presence_penalty": -0.2, "frequency_penalty": 0.4},
    "DRY": DRY,
    "DRY, of 9": {**DRY, "dry_penalty_last_n": 9},
    "DRY, from 4": {**DRY, "dry_allowed_length": 4, "dry_base": 1.2},
    "DRY, from none": {**DRY, "dry_allowed_length": 0},
    "DRY, breakers": {**DRY, "dry_sequence_breakers": [[1], [2, 0, 0]]},
    "DRY, long breakers": {**DRY, "dry_sequence_breakers": [[0, 1, 2], [0, 1], [7]]},
    "logit bias": {"logit_bias": {3: 2.5, 5: -math.inf, 50: -1.0}},
    "Mirostat's temperature": {"mirostat": 2, "temperature": 1.3, "repeat_penalty": 9.0},
    "defaults": {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
    "all": {
        **DRY, "repeat_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.05, "top_n_sigma": 2.5,
        "top_k": 30, "top_p": 0.97, "min_p": 0.01, "xtc_probability": 1.0, "temperature": 1.2,
        "dynatemp_range": 0.5, "logit_bias": {4: 1.0},
    },
    "all but sigma": {
        **DRY, "repeat_penalty": 1.1, "top_k": 30, "typical_p": 0.9, "top_p": 0.97, "min_p": 0.01,
        "xtc_probability": 1.0, "xtc_threshold": 0.05, "temperature": 1.2,
    },
    "another order": {"samplers": "min_p;temperature;top_p;top_k", "min_p": 0.01, "temperature": 1.9,
                      "top_p": 0.9, "top_k": 12},
    "penalties last": {"samplers": "top_k;penalties;temperature", "top_k": 9, "repeat_penalty": 2.0},
    "temperature left out": {"samplers": "top_p", "top_p": 0.7, "temperature": 0.0},
}  # fmt: skip


def params(options: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{**OFF, **options})


def row(rng: np.random.Generator, n_vocab: int) -> np.ndarray:
    logits = np.round(rng.normal(0, 2.5, n_vocab), 2) + np.arange(n_vocab) * 1e-5
    logits[:4] += 5
    return logits.astype(np.float32)


def history(rng: np.random.Generator) -> list[int]:
    pieces = [rng.integers(0, 4, rng.integers(1, 6)).tolist() for _ in range(3)]
    return [token for i in rng.integers(0, 3, rng.integers(3, 14)) for token in pieces[i]]


def distribution(p: SamplingParams, logits: np.ndarray, tokens: list[int]) -> dict[int, float]:
    sampler, c = Sampler(p), Candidates.of_row(logits.astype(np.float64))
    subtract(c, sampler._bias)
    for step in sampler._chain:
        step(c, tokens)
    left = zip(c.ids.tolist(), c.probabilities().tolist(), strict=True)
    return {token: q for (token, q), x in zip(left, c.scores, strict=True) if x > -np.inf}
