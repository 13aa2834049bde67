"""Samplers that remove candidates, and the temperature. One candidate always remains. Definitions are as in
llama.cpp (src/llama-sampler.cpp). Probabilities are relative to the remaining candidates."""

from __future__ import annotations

import math

import numpy as np

from vkbackend.models.sampling.candidates import Candidates, best


def top_k(c: Candidates, k: int) -> None:
    """Keep the k most likely tokens (Fan et al. 2018, arXiv:1805.04833). On ties, lower ids come first."""
    if c.whole and not c.ordered and k < len(c):
        c.keep(best(c.scores, k))
        c.ordered = True
    c.order()
    c.keep(slice(k))


def top_p(c: Candidates, p: float, min_keep: int = 0) -> None:
    """Keep the smallest set of most likely tokens whose probabilities sum to p or more (nucleus sampling,
    Holtzman et al. 2019, arXiv:1904.09751)."""
    if min_keep > 1:
        c.order()
    weights = c.weights()
    total = weights.cumsum()
    reach = p * total[-1]
    if not c.ordered:
        # First remove unlikely tokens with a total probability of at most 1 - p, because sorting all 152k
        # scores would take 15 ms.
        c.keep(weights >= (total[-1] - reach) / len(c))
        c.order()
        total = c.weights().cumsum()
    c.keep(slice(max(int(total.searchsorted(reach)) + 1, min_keep)))


def min_p(c: Candidates, p: float, min_keep: int = 0) -> None:
    """Keep tokens whose probability is at least p times the best token's probability (Nguyen et al. 2024,
    arXiv:2407.01082)."""
    if min_keep > 1:
        c.order()
    kept = c.scores - c.peak >= math.log(p)
    c.keep(slice(max(np.count_nonzero(kept), min_keep)) if c.ordered else kept)


def typical(c: Candidates, p: float, min_keep: int = 0) -> None:
    """Keep the tokens whose surprise, -log(probability), is nearest to the entropy, until their probabilities
    sum to more than p (locally typical sampling, Meister et al. 2022, arXiv:2202.00666)."""
    q = c.probabilities()
    with np.errstate(divide="ignore"):
        surprise = -np.log(q)
    entropy = _entropy(q)
    nearest = np.abs(surprise - entropy).argsort(kind="stable")
    n_kept = int(q[nearest].cumsum().searchsorted(p, side="right")) + 1
    c.keep(np.sort(nearest[: max(n_kept, min_keep)]))


def top_n_sigma(c: Candidates, n: float) -> None:
    """Keep tokens whose score is at most n standard deviations below the best score (Tang et al. 2024,
    arXiv:2411.07641). The standard deviation is over all scores. As in llama.cpp, the other tokens get a
    score of -inf."""
    if len(c) > 1:
        sigma = c.scores[c.scores > -np.inf].std()
        c.scores[c.scores < c.peak - n * sigma] = -np.inf


def xtc(
    c: Candidates, probability: float, threshold: float, random: np.random.Generator, min_keep: int = 0
) -> None:
    """With a chance of `probability`, remove all tokens whose probability is at least `threshold`, except the
    least likely ("exclude top choices", p-e-w, github.com/oobabooga/text-generation-webui/pull/6335). Remove
    none if fewer than `min_keep` would remain."""
    if len(c) < 2 or random.random() > probability:
        return
    c.order()
    # Do not count forbidden tokens, whose probability is 0.
    n_above = np.count_nonzero(c.probabilities() >= max(threshold, 1e-300))
    n_removed = max(int(n_above) - 1, 0)
    if len(c) - n_removed >= min_keep:
        c.keep(slice(n_removed, None))


def temperature(c: Candidates, t: float) -> None:
    """Divide scores by t. A t of 0 keeps only the best token, on ties the lowest id."""
    if t <= 0 and c.whole:
        place = int(c.scores.argmax())
        c.keep(slice(place, place + 1))
    elif t <= 0:
        c.order()
        c.keep(slice(1))
    else:
        # Subtract the best score first, so that a tiny temperature produces no infinite score.
        c.scores = (c.scores - c.peak) / t


def dynamic_temperature(c: Candidates, t: float, spread: float, exponent: float) -> None:
    """The temperature is t - spread if one token is certain, and t + spread if all are equally likely.
    Between these, it grows with (entropy / largest possible entropy) ** exponent (kalomaze, llama.cpp pull
    request 4972)."""
    if len(c) > 1:
        low, high = max(0.0, t - spread), t + spread
        share = _entropy(c.probabilities()) / math.log(len(c))
        temperature(c, low + (high - low) * share**exponent)


def _entropy(q: np.ndarray) -> float:
    q = q[q > 0]
    return max(0.0, -float(q @ np.log(q)))
