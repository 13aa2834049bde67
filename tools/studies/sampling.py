"""Measures the cost of sampling: `python -m vkbackend.tools.studies.sampling`.

Prints microseconds per token in `choose_rows` (best of 30 rounds) for rows of 40 candidates, sampled one by
one, together, and greedily. Also prints milliseconds for rows of 151,936 logits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from vkbackend.models.sampling import rows
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.models.sampling.sampler import Sampler

N_ROUNDS, N_VOCAB, N_TEXT = 30, 151_936, 4_000
SEQUENCES = 1, 2, 4, 5, 8, 16, 32, 64, 128
WHOLE: dict[str, dict[str, Any]] = {
    "defaults": {},
    "greedy": {"temperature": 0},
    "repetition": {"repeat_penalty": 1.1},
    "DRY": {"dry_multiplier": 0.8, "dry_sequence_breakers": [[5]]},
    "no top-k": {"top_k": 0},
    "no filter": {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "top-n-sigma": {"top_n_sigma": 1.0},
    "typical, no top-k": {"top_k": 0, "typical_p": 0.9},
    "Mirostat 1": {"mirostat": 1},
    "Mirostat 2": {"mirostat": 2},
    "logprobs": {"logprobs": 5},
}


def best_s(work: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def us_per_token(n: int, together: int, temperature: float) -> float:
    rng = np.random.default_rng(0)
    logits = -np.sort(-rng.normal(0, 3, (n, 40)).astype(np.float32))
    ids = rng.integers(0, N_VOCAB, (n, 40))
    samplers = [Sampler(SamplingParams(temperature, seed=seed)) for seed in range(n)]
    before, rows.TOGETHER = rows.TOGETHER, together
    try:
        return best_s(lambda: rows.choose_rows(samplers, [[]] * n, ids, logits), N_ROUNDS) / n * 1e6
    finally:
        rows.TOGETHER = before


def ms_per_row(options: dict[str, Any]) -> float:
    rng = np.random.default_rng(0)
    logits, text = rng.normal(0, 3, N_VOCAB).astype(np.float32), rng.integers(0, 900, N_TEXT).tolist()
    sampler = Sampler(SamplingParams(**{"seed": 1, "dry_sequence_breakers": [], **options}))
    texts = iter([*text, *range(N_ROUNDS)][: N_TEXT + i] for i in range(N_ROUNDS))
    return best_s(lambda: sampler.sample(logits, next(texts)), N_ROUNDS // 3) * 1e3


def main() -> None:
    print("| rows | one by one, us | together, us | greedy, us |\n|---|---|---|---|")
    for n in SEQUENCES:
        one_by_one, together = us_per_token(n, n + 1, 0.8), us_per_token(n, 1, 0.8)
        print(f"| {n} | {one_by_one:.1f} | {together:.1f} | {us_per_token(n, 1, 0.0):.2f} |")
    print(f"\n| a row of {N_VOCAB:,} logits | ms |\n|---|---|")
    for name, options in WHOLE.items():
        print(f"| {name} | {ms_per_row(options):.1f} |")


if __name__ == "__main__":
    main()
