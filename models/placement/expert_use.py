"""Estimates how often a cache of hot experts is hit, and how many experts a step reads from host memory.

`used` is float64 [..., n_expert], for example with a row for each layer: the probability that a token uses an
expert. The sum over experts is the number of experts per token. Tokens are assumed to choose independently.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Used = npt.NDArray[np.float64]


def even(n_expert: int, n_used: int) -> Used:
    """Return `used` [n_expert] of a router that chooses all experts equally often."""
    return np.full(n_expert, n_used / n_expert)


def zipf(n_expert: int, n_used: int, exponent: float = 1.0) -> Used:
    """Return `used` [n_expert] where the e-th most frequent expert has weight 1 / e^exponent (Zipf's law)."""
    return of_counts(1 / np.arange(1, n_expert + 1) ** exponent, n_used)


def of_counts(counts: npt.ArrayLike, n_used: int) -> Used:
    """Return `used` in proportion to `counts` [..., n_expert]. A token uses an expert at most once, so a
    probability is at most 1, and other experts share the remaining uses. Experts of a layer without counts
    are equally likely."""
    weights = np.array(counts, np.float64)
    weights[weights.sum(-1) <= 0] = 1
    used = np.zeros_like(weights)
    full = np.zeros(weights.shape, bool)
    for _ in range(n_used + 1):  # each iteration but the last sets an expert to 1
        rest = np.where(full, 0, weights)
        total = np.maximum(rest.sum(-1, keepdims=True), np.finfo(np.float64).tiny)
        used = np.where(full, 1, rest / total * (n_used - full.sum(-1, keepdims=True)))
        if not (over := used > 1).any():
            break
        full |= over
    return np.minimum(used, 1)


def resident(used: Used, n_slots: int) -> npt.NDArray[np.bool_]:
    """Return whether each expert is among the `n_slots` most used experts of its layer."""
    order = np.argsort(-used, axis=-1, kind="stable")
    return np.argsort(order, axis=-1) < n_slots


def hit_rate(used: Used, n_slots: int) -> float:
    """Return the hit rate of a cache with the `n_slots` most used experts per layer. A cache that adapts to
    the text may have a higher rate."""
    return float(used[resident(used, n_slots)].sum() / used.sum())


def experts_read(used: Used, n_rows: int, n_slots: int = 0) -> float:
    """Return the mean number of experts per layer that a step of `n_rows` tokens uses and that the cache
    lacks.

    A step reads an expert once. The probability that n tokens use an expert is 1 - (1 - used)^n.
    """
    read = np.where(resident(used, n_slots), 0, 1 - (1 - used) ** n_rows)
    return float(read.sum(-1).mean())


def tiles_read(used: Used, n_rows: int, tile: int) -> float:
    """Return the mean number of tiles of at most `tile` tokens per layer, in a step of `n_rows` tokens. The
    number of tokens of an expert has a binomial distribution."""
    n = np.arange(n_rows + 1)
    chances = np.clip(used.reshape(-1, 1), 1e-12, 1 - 1e-12)
    of_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n_rows + 1)))])
    choose = of_factorials[-1] - of_factorials - of_factorials[::-1]
    probability = np.exp(choose + n * np.log(chances) + (n_rows - n) * np.log1p(-chances))
    return float((probability * -(-n // tile)).sum() / (used.size // used.shape[-1]))
