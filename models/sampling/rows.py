"""The next token of many sequences at once: the choices of `Sampler`, computed together for all rows.

Each row draws from its own generator and every sum runs in one row, from the best candidate down, so a choice
is the same to the last bit whoever shares the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vkbackend.errors import VkbackendError
from vkbackend.models.sampling.sampler import Sampler

# Rows from which arrays of all of them are faster: 42 us and 2 us a row against 12 us a row.
TOGETHER = 5

Choice = int | VkbackendError


def choose_rows(
    samplers: Sequence[Sampler],
    histories: Sequence[Sequence[int]],
    ids: np.ndarray | None,
    logits: np.ndarray,
) -> list[Choice]:
    """The next token of each row, or what is wrong with that row alone.

    ids [n, k] and float32 logits [n, k]: candidates, best first, at least as many as any sampler's
    `n_candidates`. Without ids the logits are whole rows [n, n_vocab].
    """
    if ids is None:
        return [_sampled(*row) for row in zip(samplers, logits, histories, strict=True)]
    if not all(map(math.isfinite, logits[:, 0].tolist())):
        return [_chosen(*row) for row in zip(samplers, ids, logits, strict=True)]
    chosen: list[Choice] = ids[:, 0].tolist()
    drawn = [row for row, sampler in enumerate(samplers) if sampler.params.temperature]
    if len(drawn) < TOGETHER:
        for row in drawn:
            chosen[row] = _chosen(samplers[row], ids[row], logits[row])
        return chosen
    if len(drawn) < len(samplers):
        ids, logits = ids[drawn], logits[drawn]
    for row, token in zip(drawn, _draw([samplers[row] for row in drawn], ids, logits), strict=True):
        chosen[row] = token
    return chosen


def _sampled(sampler: Sampler, logits: np.ndarray, history: Sequence[int]) -> Choice:
    try:
        return sampler.sample(logits, history)
    except VkbackendError as error:
        return error


def _chosen(sampler: Sampler, ids: np.ndarray, logits: np.ndarray) -> Choice:
    try:
        return sampler.choose(ids, logits)
    except VkbackendError as error:
        return error


def _draw(samplers: Sequence[Sampler], ids: np.ndarray, logits: np.ndarray) -> list[int]:
    """`Sampler._draw_best` for rows whose best logit is finite and whose temperature is not 0."""
    n, k = ids.shape
    params = [sampler.params for sampler in samplers]
    values = [(p.temperature, p.top_p, p.min_p, p.top_k, s.random.random())
              for p, s in zip(params, samplers, strict=True)]  # fmt: skip
    temperature, top_p, min_p, top_k, random = np.array(values).T[:, :, None]
    below = logits.astype(np.float64)
    below -= below[:, :1].copy()
    weights = np.exp(below)
    weights[np.arange(k) >= top_k] = 0  # adds nothing to the sums
    total = weights.cumsum(axis=1)
    n_top_p = np.count_nonzero(total < top_p * total[:, -1:], axis=1) + 1
    n_min_p = np.count_nonzero(weights >= min_p, axis=1)
    n_kept = np.where(top_p[:, 0] < 1, np.minimum(n_top_p, n_min_p), n_min_p)
    n_kept = np.minimum(n_kept, top_k[:, 0].astype(np.int64))
    below /= temperature
    total = np.exp(below).cumsum(axis=1)
    rows = np.arange(n)
    draw = np.count_nonzero(total <= random * total[rows, n_kept - 1][:, None], axis=1)
    chosen: list[int] = ids[rows, np.minimum(draw, n_kept - 1)].tolist()
    return chosen
