"""Makes `golden/samplers.json`: the probabilities that llama.cpp's samplers assign to rows of logits.

    PYTHONPATH=tests/support python tests/support/oracles/make_samplers.py          # Writes the file.
    PYTHONPATH=tests/support python tests/support/oracles/make_samplers.py --table  # Prints a comparison.

Each line of the table shows one case. The first column counts the random rows of 2,000 logits for which both
samplers keep the same tokens. The other columns are the largest difference of a probability, and chi-square
of vkbackend's draws from one row. Chi-square uses 100,000 draws, or 10,000 draws if at least 500 tokens
remain. Needs xllamacpp.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
from oracles import llama_cpp, llama_samplers
from oracles.sampler_cases import CASES, distribution, history, params, row
from places import GOLDEN

from vkbackend.models.sampling.sampler import Sampler

N_VOCAB, N_ROWS, N_STEPS = 64, 2, 12
N_COMPARED, N_DRAWN = 200, 100_000


def chains() -> list[dict[str, Any]]:
    cases = []
    for name, options in CASES.items():
        if params(options).mirostat:
            continue
        rng = np.random.default_rng(len(cases))
        for _ in range(N_ROWS):
            logits, tokens = row(rng, N_VOCAB), history(rng)
            left = llama_samplers.distribution(params(options), logits, tokens)
            cases.append({"case": name, "logits": written(logits), "history": tokens,
                         "left": {str(token): round(q, 6) for token, q in sorted(left.items())}})  # fmt: skip
    return cases


def mirostats() -> list[dict[str, Any]]:
    runs = []
    for version in (1, 2):
        options = {"mirostat": version, "mirostat_tau": 2.5, "mirostat_eta": 0.3, "temperature": 1.1}
        rng, steps = np.random.default_rng(version), []
        with llama_samplers.chain(params(options), N_VOCAB) as chain:
            for _ in range(N_STEPS):
                logits = row(rng, N_VOCAB)
                left, drawn = chain.apply(logits)
                steps.append({"logits": written(logits), "left": sorted(left), "drawn": drawn})
        runs.append({"options": options, "steps": steps})
    return runs


def written(logits: np.ndarray) -> list[float]:
    return [round(float(x), 5) for x in logits]


def chi_square(observed: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Return chi-square and its degrees of freedom. Tokens with fewer than 5 expected draws are merged."""
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    used = expected > 0
    return float(((observed - expected)[used] ** 2 / expected[used]).sum()), int(used.sum()) - 1


def table() -> None:
    print(f"{llama_cpp.versions()}; {N_COMPARED} rows of 2,000 logits, {N_DRAWN} draws")
    print(f"{'samplers':30} {'same tokens':>12} {'largest dp':>11} {'chi2 / df':>16}")
    for name, options in CASES.items():
        p, rng = params(options), np.random.default_rng(7)
        if p.mirostat:
            continue
        n_same, largest, left = 0, 0.0, {0: 1.0}
        for _ in range(N_COMPARED):
            logits, tokens = row(rng, 2_000), history(rng)
            left = llama_samplers.distribution(p, logits, tokens)
            ours = distribution(p, logits, tokens)
            n_same += set(ours) == set(left)
            largest = max(largest, *(abs(ours.get(token, 0) - q) for token, q in left.items()))
        sampler = Sampler(p)
        n_drawn = N_DRAWN if len(left) < 500 else N_DRAWN // 10
        drawn = np.bincount([sampler.sample(logits, tokens) for _ in range(n_drawn)], minlength=2_000)
        expected = np.zeros(2_000)
        expected[list(left)] = np.array(list(left.values())) * n_drawn
        value, freedom = chi_square(drawn, expected)
        print(f"{name:30} {n_same:6} / {N_COMPARED} {largest:11.1e} {value:9.1f} / {freedom}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true")
    if parser.parse_args().table:
        table()
        return
    results = {"made_by": llama_cpp.versions(), "chains": chains(), "mirostat": mirostats()}
    text = json.dumps(results, separators=(",", ":")).replace('{"case"', '\n{"case"')
    (GOLDEN / "samplers.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
