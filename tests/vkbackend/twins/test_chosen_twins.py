"""The twins of attention to chosen positions equal scalar loops and attn_decode."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vkbackend import twins
from vkbackend.step import Run, StepParams

pytestmark = pytest.mark.no_vulkan

RNG = np.random.default_rng(2512)
CELLS = np.array([[3, 1], [0, 2]], np.uint32)  # two slots of two blocks each
N, HEADS, HEAD, N_POSITIONS = 4, 3, 8, 64


def f32(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def step() -> StepParams:
    """Return a step with positions 39 and 40 of slot 1 and position 5 of slot 0. Row 3 belongs to no run."""
    params = StepParams()
    params.fill([0] * 3, [Run(1, 0, 2, 39), Run(0, 2, 1, 5)], [])
    return params


def cell(slot: int, position: int) -> int:
    return int(CELLS[slot, position // 32]) * 32 + position % 32


def test_scores_and_choice_by_scalars() -> None:
    q, w, keys = f32(N, HEADS, HEAD), f32(N, HEADS), f32(128, HEAD)
    y, ids = np.full((N, N_POSITIONS), np.nan, np.float32), np.full((N, 7), 99, np.uint32)
    where = {"n_rows": N, "first_row": 0, "n_positions": N_POSITIONS}
    twins.chosen.index_scores(
        q, w, keys, CELLS, y, step(), n_heads=HEADS, blocks_per_slot=2, head=HEAD, **where
    )
    twins.chosen.index_top_k(y, ids, step(), n_chosen=7, **where)
    for row, (slot, position) in enumerate([(1, 39), (1, 40), (0, 5)]):
        want = []
        for p in range(position + 1):
            key = keys[cell(slot, p)].astype(float)
            dots = [float(key @ q[row, h].astype(float)) for h in range(HEADS)]
            want.append(math.fsum(float(w[row, h]) * max(dots[h], 0) for h in range(HEADS)))
        np.testing.assert_allclose(y[row, : position + 1], want, rtol=1e-6, atol=1e-7)
        assert np.isnan(y[row, position + 1 :]).all()
        best = sorted(sorted(range(position + 1), key=lambda p: (-want[p], p))[:7])
        assert ids[row].tolist() == [*best, *[99] * (7 - len(best))]
    assert np.isnan(y[3]).all() and (ids[3] == 99).all()


def test_ties_go_to_the_lower_position_and_nan_comes_first() -> None:
    x = np.tile(np.float32([-0.0, 0.0, 1, 0.0, np.nan, -np.inf, np.inf, 9]), (1, 8))
    ids = np.zeros((1, 3), np.uint32)
    how = {"n_rows": 1, "n_positions": 64, "n_chosen": 3}
    params = StepParams()
    for last, want in ((6, [2, 4, 6]), (5, [0, 2, 4]), (3, [0, 1, 2])):
        params.fill([0], [Run(0, 0, 1, last)], [])
        twins.chosen.index_top_k(x, ids, params, first_row=0, **how)
        assert ids[0].tolist() == want


@pytest.mark.parametrize("n_splits", [1, 2])
def test_attention_to_all_positions_is_attention(n_splits: int) -> None:
    q, k, v = f32(N, 4, HEAD), f32(128, 2 * HEAD), f32(128, 2 * HEAD)
    how = {"n_heads": 4, "n_kv": 2, "group": 2, "q_first": 0, "n_rows": N, "blocks_per_slot": 2}
    how |= {"n_splits": n_splits, "head_k": HEAD, "head_v": HEAD}
    want, got = (np.full((N, 4, n_splits, HEAD + 2), np.nan, np.float32) for _ in range(2))
    twins.attention.attn_decode(
        q, k, v, CELLS, q, q, want, step(), **how, window=0, chunk=0, scale=0.3, softcap=0.0
    )
    every = np.tile(np.arange(41, dtype=np.uint32), (N, 1))
    twins.chosen.attn_chosen(q, k, v, CELLS, every, got, step(), **how, n_chosen=41, scale=0.3)
    np.testing.assert_array_equal(got, want)


def test_attention_to_some_positions_is_attention_to_copies_of_them() -> None:
    q, k, v = f32(1, 2, HEAD), f32(128, HEAD), f32(128, HEAD)
    some, got, want = [5, 20, 38], np.zeros((1, 2, HEAD), np.float32), np.zeros((1, 2, HEAD), np.float32)
    how = {"n_heads": 2, "n_kv": 1, "group": 2, "q_first": 0, "n_rows": 1, "blocks_per_slot": 2}
    how |= {"n_splits": 1, "head_k": HEAD, "head_v": HEAD, "final": 1}
    params = StepParams()
    params.fill([0], [Run(1, 0, 1, 39)], [])
    twins.chosen.attn_chosen(
        q, k, v, CELLS, np.array([some], np.uint32), got, params, **how, n_chosen=3, scale=0.3
    )
    for i, position in enumerate(some):
        k[cell(0, i)], v[cell(0, i)] = k[cell(1, position)], v[cell(1, position)]
    params.fill([0], [Run(0, 0, 1, 2)], [])
    twins.attention.attn_decode(
        q, k, v, CELLS, q, q, want, params, **how, window=0, chunk=0, scale=0.3, softcap=0.0
    )
    np.testing.assert_array_equal(got, want)
