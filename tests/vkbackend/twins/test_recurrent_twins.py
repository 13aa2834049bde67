"""The twins of recurrent ops equal scalar loops, and chunks compute the same results as single tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from device_sets import covering, product

from vkbackend import twins
from vkbackend.ops.recurrent import CHUNK, CHUNK_KDA
from vkbackend.step import Run, StepParams

pytestmark = pytest.mark.no_vulkan


RNG = np.random.default_rng(20240917)


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sum((got - want) ** 2) / np.sum(want.astype(np.float64) ** 2))


def one_run(n: int, first_pos: int, states: tuple[int, int]) -> StepParams:
    step = StepParams()
    step.fill([0] * n, [Run(0, 0, n, first_pos, states)], [])
    return step


def scalar_delta(a: dict[str, np.ndarray], heads: list[int]) -> tuple[np.ndarray, np.ndarray]:
    n_rows, _, size = a["v"].shape
    out, states = np.zeros(a["v"].shape), a["state"].astype(np.float64)
    for h, key_head in enumerate(heads):
        for t in range(n_rows):
            q, k = a["q"][t, key_head].astype(np.float64), a["k"][t, key_head].astype(np.float64)
            alpha = np.exp(a["g"][t, h].astype(np.float64)) * np.ones(size)
            beta = float(a["beta"][t, h])
            # S_t = (I - beta k k^T) diag(alpha) S_t-1 + beta k v^T
            erase = np.eye(size) - beta * np.outer(k, k)
            states[h] = erase @ (alpha[:, None] * states[h]) + beta * np.outer(k, a["v"][t, h])
            out[t, h] = states[h].T @ q / math.sqrt(size)
    return out, states


HEADS = [pytest.param(*of, id="-".join(map(str, of))) for of in ((4, 64, 1), (2, 32, 2), (1, 16, 3))]


@pytest.mark.parametrize(
    ("n_rows", "n_k", "size", "repeat", "kda"),
    covering([1, 4, 33, 64, 65, 127, 200], product(HEADS, [False, True]), each=2),
)
def test_chunks_are_recurrent(n_rows: int, n_k: int, size: int, repeat: int, kda: bool) -> None:
    n_heads, c = n_k * repeat, CHUNK_KDA if kda else CHUNK
    unit = RNG.uniform(-1, 1, (2, n_rows, n_k, size))
    unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
    least = -20 if n_rows < 50 else -2
    arrays = {
        "q": unit[0],
        "k": unit[1],
        "v": RNG.uniform(-0.3, 5, (n_rows, n_heads, size)),
        "g": RNG.uniform(least, -1e-4, (n_rows, n_heads, size if kda else 1)),
        "beta": RNG.uniform(0, 1, (n_rows, n_heads)),
        "state": RNG.uniform(-1, 1, (n_heads, size, size)),
    }
    a = {name: value.astype(np.float32) for name, value in arrays.items()}
    step = one_run(n_rows, 7, (1, 0))
    inputs = [a[name] for name in ("q", "k", "v", "g", "beta")]
    shape: dict[str, Any] = {"n_heads": n_heads, "n_rows": n_rows, "s": size}
    how = shape | {"n_k": n_k, "q_stride": n_k * size, "v_stride": n_heads * size, "kda": int(kda)}
    how |= {"scale": size**-0.5}
    for tiled in (0, 1):
        heads = [h % n_k if tiled else h // repeat for h in range(n_heads)]
        want, want_state = scalar_delta(a, heads)
        states = np.full((2, 2, n_heads, size, size), np.nan, np.float32)
        states[:, 1] = a["state"]
        y = np.full((2, n_rows, n_heads, size), np.nan, np.float32)
        work = np.full((n_rows, n_heads, 5 * size + c), np.nan, np.float32)
        twins.recurrent.delta_net(*inputs, states[0], y[0], step, tiled=tiled, **how)
        twins.recurrent.delta_chunk(*inputs, work, step, tiled=tiled, c=c, **how)
        twins.recurrent.delta_scan(work, states[1], y[1], step, c=c, **shape)
        for i in range(2):
            assert nmse(y[i], want) < 1e-12 and nmse(states[i, 0], want_state) < 1e-12, i


def test_conv_in_two_steps_is_conv_in_one() -> None:
    x, w = (RNG.uniform(-1, 1, shape).astype(np.float32) for shape in ((11, 3), (3, 4)))
    want = np.zeros((11, 3))
    for t in range(11):
        for c in range(3):
            total = sum(float(w[c, j]) * float(x[t - 3 + j, c]) for j in range(4) if t - 3 + j >= 0)
            want[t, c] = total / (1 + math.exp(-total))
    state, y = np.full((3, 3, 3), np.nan, np.float32), np.full((11, 3), np.nan, np.float32)
    at, read = 0, 2
    for n, written in ((2, 1), (1, 1), (8, 0)):
        step = one_run(n, at, (read, written))
        part = x[at : at + n], w, w, state, y[at : at + n], step
        twins.recurrent.ssm_conv(*part, width=3, n_rows=n, d_conv=4)
        at, read = at + n, written
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(state[0], x[-3:].T)


def test_gates() -> None:
    a, dt, decay = np.array([[-40, -1, 0, 50]], np.float32), np.zeros(4, np.float32), np.array([-2, -1])
    b, g, beta = np.array([[-200, 3]], np.float32), np.zeros((1, 4), np.float32), np.zeros((1, 2), np.float32)
    twins.recurrent.delta_gates(a, dt, decay, b, g, beta, n_heads=2, width=2, n_rows=1)
    want = [-2 * math.exp(-40), -2 * math.log1p(math.exp(-1)), -math.log(2), -50]
    np.testing.assert_allclose(g[0], want, rtol=1e-6)
    np.testing.assert_allclose(beta[0], [math.exp(-200), 1 / (1 + math.exp(-3))], rtol=1e-6, atol=1e-45)


def test_l2_norm_has_unit_length() -> None:
    x, y = RNG.uniform(-1, 1, (3, 20)).astype(np.float32), np.zeros((3, 2, 8), np.float32)
    twins.recurrent.l2_norm(x, y, n=8, n_heads=2, x_stride=20, n_rows=3, eps=0.0)
    np.testing.assert_allclose(np.linalg.norm(y, axis=2), 1, rtol=1e-6)
    np.testing.assert_allclose(y[1, 1] / y[1, 1, 0], x[1, 8:16] / x[1, 8], rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_the_scan_is_a_masked_product(rows: int) -> None:
    """The state space duality (Dao and Gu 2024, eq. 6) is y_t = sum over s <= t of e^(A (T_t - T_s)) C_t B_s
    t_s x_s. T_t is the running sum of the steps t_s. The initial state decays by the same rule as later
    states."""
    heads, p, n = 6, 5, 8
    shapes = {"x": (heads, p), "bc": (2, 2, n), "dt": (heads,)}
    a = {name: RNG.uniform(-1, 1, (rows, *shape)).astype(np.float32) for name, shape in shapes.items()}
    bias, decay, skip = RNG.uniform(-1, 1, (3, heads)).astype(np.float32)
    decay, state = -np.abs(decay), RNG.uniform(-1, 1, (2, heads, n, p)).astype(np.float32)
    y, before = np.full((rows, heads, p), np.nan, np.float32), state[1].astype(np.float64)
    where = {"n_heads": heads, "n_groups": 2, "group": 4, "first": 1, "n_rows": rows, "p": p, "n": n}
    vectors = bias, decay, skip, state
    twins.state_space.ssm_scan(a["x"], a["bc"], a["dt"], *vectors, y, one_run(rows, 7, (1, 0)), **where)
    for h in range(heads):
        b, c = (a["bc"][:, i, (h + 1) // 4].astype(np.float64) for i in range(2))
        steps = np.log1p(np.exp(a["dt"][:, h].astype(np.float64) + bias[h]))
        sums, added = decay[h] * np.cumsum(steps), steps[:, None] * a["x"][:, h]
        since = np.exp(np.minimum(sums[:, None] - sums, 0)) * np.tri(rows)
        old = np.exp(sums)[:, None] * (c @ before[h])
        want = (since * (c @ b.T)) @ added + old + skip[h] * a["x"][:, h]
        after = np.exp(sums[-1]) * before[h] + (since[-1, :, None] * b).T @ added
        assert nmse(y[:, h], want) < 1e-12 and nmse(state[0, h], after) < 1e-12


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_the_selective_scan_is_a_sum_of_decayed_rows(rows: int) -> None:
    """The solution is m_t = e^(a T_t) m_0 + sum over s <= t of e^(a (T_t - T_s)) B_s t_s x_s. T_t
    is the running sum of the steps t_s (Gu and Dao 2023, arXiv:2312.00752, algorithm 2)."""
    width, n = 5, 8
    shapes = {"x": width, "dt": width, "b": n, "c": n}
    values = {name: RNG.uniform(-1, 1, (rows, size)).astype(np.float32) for name, size in shapes.items()}
    decay = -RNG.uniform(0.1, 2, (width, n)).astype(np.float32)
    skip, state = RNG.uniform(-1, 1, width).astype(np.float32), RNG.uniform(-1, 1, (2, width, n))
    state = state.astype(np.float32)
    y, before = np.full((rows, width), np.nan, np.float32), state[1].astype(np.float64)
    args = *values.values(), decay, skip, state, y, one_run(rows, 7, (1, 0))
    twins.state_space.selective_scan(*args, width=width, n_rows=rows, n=n)
    x, dt, b, c = (array.astype(np.float64) for array in values.values())
    for i in range(width):
        steps = np.log1p(np.exp(dt[:, i]))
        sums = np.cumsum(steps)
        elapsed = np.maximum(sums[:, None] - sums, 0)[:, :, None]
        since = np.tri(rows)[:, :, None] * np.exp(elapsed * decay[i])
        added = b * (steps * x[:, i])[:, None]
        states = np.exp(sums[:, None] * decay[i]) * before[i] + np.einsum("tsn,sn->tn", since, added)
        assert nmse(y[:, i], (states * c).sum(axis=1) + skip[i] * x[:, i]) < 1e-12
        assert nmse(state[0, i], states[-1]) < 1e-12


def test_wkv_without_removal_is_linear_attention() -> None:
    """If no key is removed, y_t = sum over s <= t of v_s (r_t . (w_t ... w_{s+1}) key_s) (Peng et al. 2025,
    arXiv:2503.14456, section 3)."""
    rows, heads, size = 9, 2, 8
    r, decay, key, v = RNG.uniform(-1, 1, (4, rows, heads, size)).astype(np.float32)
    none, state = np.zeros_like(r), RNG.uniform(-1, 1, (2, heads, size, size)).astype(np.float32)
    y, before = np.full_like(r, np.nan), state[1].astype(np.float64)
    where = {"n_heads": heads, "n_rows": rows, "s": size}
    twins.rwkv.wkv(r, decay, key, v, none, none, state, y, one_run(rows, 7, (1, 0)), **where)
    sums = np.cumsum(-0.606531 / (1 + np.exp(-decay.astype(np.float64))), axis=0)
    for h in range(heads):
        since = np.tri(rows)[:, :, None] * np.exp(np.minimum(sums[:, None, h] - sums[None, :, h], 0))
        scores = np.einsum("ti,tsi,si->ts", r[:, h], since, key[:, h])
        old = (np.exp(sums[:, h]) * r[:, h]) @ before[h]
        assert nmse(y[:, h], scores @ v[:, h] + old) < 1e-12


def test_wkv_replaces_the_value_of_a_key() -> None:
    """With rates of 1 and almost no decay, a removed key's value is the new value (the delta rule)."""
    size = 8
    key = RNG.uniform(-1, 1, (1, 1, size)).astype(np.float32)
    key /= np.linalg.norm(key)
    v, state = RNG.uniform(-1, 1, (1, 1, size)).astype(np.float32), RNG.uniform(-1, 1, (1, 1, size, size))
    state, y = state.astype(np.float32), np.full_like(v, np.nan)
    slow = np.full_like(key, -60)
    args = key, slow, key, v, key, key, state, y, one_run(1, 7, (0, 0))
    twins.rwkv.wkv(*args, n_heads=1, n_rows=1, s=size)
    assert nmse(y, v) < 1e-12


def test_a_norm_of_groups_over_two_devices() -> None:
    """Three groups of 12 columns are split: one device has columns 0 to 20, the other 20 to 36."""
    x, z, w = (RNG.uniform(-2, 2, shape).astype(np.float32) for shape in ((2, 36), (2, 36), (36,)))
    gated = z / (1 + np.exp(-z.astype(np.float64))) * x
    squares = (gated * gated).reshape(2, 3, 12).mean(axis=2)
    want = gated / np.sqrt(np.repeat(squares, 12, axis=1) + 0.5) * w
    where = {"group": 12, "n_groups": 3, "n_rows": 2, "has_z": 1}
    cuts = (0, 20), (20, 36)
    sums = np.full((2, 2, 3), np.nan, np.float32)
    for i, (begin, end) in enumerate(cuts):
        part = z[:, begin:end], x[:, begin:end], sums[i]
        twins.state_space.group_squares(*part, width=end - begin, first=begin, skip=0, **where)
    for begin, end in cuts:
        y = np.full((2, end - begin), np.nan, np.float32)
        part = z[:, begin:end], x[:, begin:end], sums.sum(axis=0), w[begin:end], y
        twins.state_space.group_norm(*part, width=end - begin, first=begin, eps=0.5, **where)
        assert nmse(y, want[:, begin:end]) < 1e-12
