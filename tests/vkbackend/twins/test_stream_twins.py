from __future__ import annotations

import numpy as np
import pytest

from vkbackend import twins

pytestmark = pytest.mark.no_vulkan

RNG = np.random.default_rng(2301)
ROWS, M, N = 3, 4, 5


def f32(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def test_streams_start_with_the_norm_of_the_first() -> None:
    x, a, y = f32(ROWS, N), f32(ROWS, M - 1, N), np.full((ROWS, M, N), np.nan, np.float32)
    a[1, 1] = 1e-4
    twins.streams.streams_of(x, a, y, n=N, n_streams=M, n_rows=ROWS, least=1e-5)
    np.testing.assert_array_equal(y[:, 0], x)
    sizes = np.linalg.norm(y, axis=2) / np.linalg.norm(x, axis=1)[:, None]
    want = np.ones((ROWS, M))
    want[1, 2] = 1e-4 / 1e-5**0.5
    np.testing.assert_allclose(sizes, want, rtol=1e-6)
    np.testing.assert_allclose(y[0, 2] / a[0, 1], y[0, 2, 0] / a[0, 1, 0], rtol=1e-6)


def test_streams_predict_and_correct() -> None:
    x, routed, a, g = f32(ROWS, M, N), f32(ROWS, M), f32(ROWS, N), f32(N)
    among, gains = f32(M * M, M), f32(M, M)
    y, z = np.full((ROWS, M, N), np.nan, np.float32), np.full((ROWS, N), np.nan, np.float32)
    how = {"n": N, "n_rows": ROWS, "scale": 0.5, "streams": M}
    modes = np.tanh(routed.astype(np.float64) / 2)
    twins.streams.streams_predict(x, routed, among, y, **how)
    for r in range(ROWS):
        for i in range(M):
            want = x[r, i] + sum(among[i * M + j] @ modes[r] * x[r, j] for j in range(M))
            np.testing.assert_allclose(y[r, i], want, rtol=1e-5, atol=1e-6)
    twins.streams.streams_correct(x, a, routed, gains, g, y, z, **how)
    for r in range(ROWS):
        for i in range(M):
            want = x[r, i] + (1 + gains[i] @ modes[r]) * (a[r] - x[r, 0])
            np.testing.assert_allclose(y[r, i], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(z, y[:, 0] * g, rtol=1e-6)


def test_all_streams_except_the_first_are_added_to() -> None:
    x, a, y = f32(ROWS, M, N), f32(ROWS, N), np.full((ROWS, M, N), np.nan, np.float32)
    twins.streams.streams_add(x, a, y, n=N, n_streams=M, n_rows=ROWS)
    np.testing.assert_array_equal(y[:, 0], x[:, 0])
    np.testing.assert_array_equal(y[:, 2], x[:, 2] + a)


def test_gaussian_topk_selects_one_in_twenty_normal_values() -> None:
    n, c = 100_000, 1.6448536
    x = 3 + 2 * f32(2, n)
    moments, y = np.empty((2, 2), np.float32), np.empty_like(x)
    twins.rows.row_moments(x, moments, n=n, n_rows=2)
    np.testing.assert_allclose(moments.T / n, [x.mean(axis=1), (x * x).mean(axis=1)], rtol=1e-4)
    twins.rows.gaussian_topk(x, moments, y, n=n, width=n, n_rows=2, c=c)
    np.testing.assert_allclose((y > 0).mean(axis=1), 0.05, atol=0.003)
    kept = y > 0
    np.testing.assert_allclose((x - y)[kept], (3 + 2 * c), rtol=0.01)


def test_centered_rows_have_a_mean_of_0() -> None:
    x = 7 + f32(ROWS, 50)
    y = np.full_like(x, np.nan)
    twins.rows.center(x, y, n=50, n_rows=ROWS, share=1 / 50)
    np.testing.assert_allclose(y.mean(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(np.ptp(x - y, axis=1), 0, atol=2e-6)
