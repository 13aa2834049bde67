"""Chooses tokens of many sequences at once, like `Sampler.choose`. Each row has its own random generator and
its own sums, so the other rows of a step never change its choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vkbackend.errors import VkbackendError
from vkbackend.models.sampling.sampler import Sampler

# From this many rows on, one array is faster than separate rows. An array takes 45 us plus 2.3 us per row,
# separate rows take 12 us each (tools/studies/sampling.py).
TOGETHER = 5

Choice = int | VkbackendError


def choose_rows(
    samplers: Sequence[Sampler],
    histories: Sequence[Sequence[int]],
    ids: np.ndarray | None,
    logits: np.ndarray,
    log_sums: np.ndarray | None = None,
) -> list[Choice]:
    """Return the next token of each row, or the error of the row.

    `ids` [n, k] and float32 `logits` [n, k] are candidates, best first, at least `n_candidates` per sampler.
    Without ids, the logits are complete rows [n, n_vocab]. `log_sums` float64 [n] is log(sum(exp(logits))) of
    the complete rows.
    """
    sums = [math.nan] * len(samplers) if log_sums is None else log_sums.tolist()
    if ids is None:
        together = len(samplers) >= TOGETHER and all([sampler.ranked for sampler in samplers])
        if not together or not np.isfinite(logits.max(axis=1)).all():
            whole = zip(samplers, logits, histories, strict=True)
            return [_tried(sampler.sample, *row) for sampler, *row in whole]
        if all([sampler.greedy for sampler in samplers]):
            best: list[Choice] = logits.argmax(axis=1).tolist()
            return best
        ids, logits = best_of_rows(logits, max(sampler.n_candidates(()) for sampler in samplers))
    if not all(map(math.isfinite, logits[:, 0].tolist())):
        rows = zip(samplers, ids, logits, histories, sums, strict=True)
        return [_tried(sampler.choose, *row) for sampler, *row in rows]
    chosen: list[Choice] = ids[:, 0].tolist()
    alone, drawn = [], []
    for row, sampler in enumerate(samplers):
        if not sampler.plain or (sampler.forbidden and not sampler.forbidden.isdisjoint(ids[row].tolist())):
            alone.append(row)
        elif not sampler.greedy:
            drawn.append(row)
    if len(drawn) < TOGETHER:
        alone, drawn = alone + drawn, []
    for row in alone:
        chosen[row] = _tried(samplers[row].choose, ids[row], logits[row], histories[row], sums[row])
    if not drawn:
        return chosen
    if len(drawn) < len(samplers):
        ids, logits = ids[drawn], logits[drawn]
    for row, token in zip(drawn, _draw([samplers[row] for row in drawn], ids, logits), strict=True):
        chosen[row] = token
    return chosen


def best_of_rows(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and logits [n, k] of the k best tokens of each row, best first, on ties the lower id first.
    `logits` is float32 [n, n_vocab] without NaN."""
    k = min(k, logits.shape[1])
    # Each token gets one integer, whose order is by logit, then by id. The high 32 bits are the logit's bits,
    # which sort as integers once negative logits are inverted. The low 32 bits are n_vocab - 1 - id.
    bits = (logits + np.float32(0)).view(np.int32)  # Adding 0 turns -0 into 0.
    rank = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64) << 32
    rank |= np.arange(logits.shape[1] - 1, -1, -1)
    best = np.partition(rank, logits.shape[1] - k, axis=1)[:, logits.shape[1] - k :]
    best.sort(axis=1)
    ids = logits.shape[1] - 1 - (best[:, ::-1] & 0xFFFFFFFF)
    return ids, logits[np.arange(len(logits))[:, None], ids]


def _tried(choose: Callable[..., int], *row: Any) -> Choice:
    try:
        return choose(*row)
    except VkbackendError as error:
        return error


def _draw(samplers: Sequence[Sampler], ids: np.ndarray, logits: np.ndarray) -> list[int]:
    """Choose tokens for plain samplers that are not greedy. The best logit of each row must be finite."""
    n, k = ids.shape
    values = [(*sampler.values, sampler.random.random()) for sampler in samplers]
    temperature, top_p, least, top_k, random = np.array(values).T[:, :, None]
    below = logits.astype(np.float64)
    below -= below[:, :1].copy()
    weights = np.exp(below)
    weights[np.arange(k) >= top_k] = 0
    total = weights.cumsum(axis=1)
    n_top_p = np.count_nonzero(total < top_p * total[:, -1:], axis=1) + 1
    n_min_p = np.count_nonzero(below >= least, axis=1)
    n_kept = np.where(top_p[:, 0] < 1, np.minimum(n_top_p, n_min_p), n_min_p)
    n_kept = np.minimum(n_kept, top_k[:, 0].astype(np.int64))
    below /= temperature
    total = np.exp(below).cumsum(axis=1)
    rows = np.arange(n)
    draw = np.count_nonzero(total <= random * total[rows, n_kept - 1][:, None], axis=1)
    chosen: list[int] = ids[rows, np.minimum(draw, n_kept - 1)].tolist()
    return chosen
