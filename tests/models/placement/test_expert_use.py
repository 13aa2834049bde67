"""The estimates agree with simulated routers."""

from __future__ import annotations

import numpy as np
import pytest

from vkbackend.models.placement.expert_use import (
    even,
    experts_read,
    hit_rate,
    of_counts,
    resident,
    tiles_read,
    zipf,
)

pytestmark = pytest.mark.no_vulkan


def sampled(used: np.ndarray, n_rows: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the experts of each row, bool [n_rows, n_expert]. Each expert has exactly the probability in
    `used` (systematic sampling, Madow 1949)."""
    chosen = np.zeros((n_rows, used.size), bool)
    for row in chosen:
        order = rng.permutation(used.size)
        ends = np.cumsum(used[order])
        at = rng.random() + np.arange(round(used.sum()))
        row[order[np.minimum(np.searchsorted(ends, at), used.size - 1)]] = True
    return chosen


@pytest.mark.parametrize("used", [even(128, 4), zipf(128, 4), zipf(64, 8, 1.5), of_counts([5, 0, 1, 1], 2)])
def test_a_simulated_router_has_these_rates(used: np.ndarray) -> None:
    rng, n_rows, trials = np.random.default_rng(3), 12, 600
    n_slots = used.size // 4
    assert np.all((used >= 0) & (used <= 1)) and abs(used.sum() - round(used.sum())) < 1e-9
    rows = sampled(used, n_rows * trials, rng)
    in_cache = resident(used, n_slots)
    assert in_cache.sum() == n_slots
    # The error of a mean of 7,200 rows of at most 8 experts is below 0.008.
    assert abs(rows[:, in_cache].sum() / rows.sum() - hit_rate(used, n_slots)) < 0.03
    steps = rows.reshape(trials, n_rows, -1).any(1)
    for slots, read in ((0, steps), (n_slots, steps & ~in_cache)):
        assert abs(read.sum(1).mean() - experts_read(used, n_rows, slots)) < 0.5


def test_tiles_of_a_simulated_router() -> None:
    used, rng = zipf(32, 4), np.random.default_rng(5)
    for n_rows, tile in ((40, 8), (64, 32), (3, 1)):
        pairs = sampled(used, n_rows * 200, rng).reshape(200, n_rows, -1).sum(1)
        want = (-(-pairs // tile)).sum(1).mean()
        assert tiles_read(used, n_rows, tile) == pytest.approx(want, rel=0.05)
    layers = np.stack([used, even(32, 4)])
    both = [tiles_read(of, 64, 8) for of in layers]
    assert tiles_read(layers, 64, 8) == pytest.approx(sum(both) / 2)
    assert tiles_read(of_counts([1, 1, 0, 0], 2), 100, 32) == pytest.approx(2 * 4)


def test_counts_of_several_layers() -> None:
    counts = [[8, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    used = of_counts(counts, 2)
    assert np.allclose(used, [[1, 0.5, 0.5, 0], [0.5] * 4, [0.5] * 4])
    assert hit_rate(used, 0) == 0 and hit_rate(used, 4) == 1
    assert hit_rate(used, 2) == pytest.approx((1.5 + 1 + 1) / 6)
    assert experts_read(used, 1) == pytest.approx(2)
    assert experts_read(used, 10_000) == pytest.approx((3 + 4 + 4) / 3)


def test_an_even_router_hits_in_proportion() -> None:
    for n_slots in range(0, 129, 16):
        assert hit_rate(even(128, 4), n_slots) == pytest.approx(n_slots / 128)
        assert hit_rate(zipf(128, 4), n_slots) >= n_slots / 128
