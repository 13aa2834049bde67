from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from vkbackend import twins
from vkbackend.ops.elementwise import ACTS
from vkbackend.step import Mix, Run, StepParams

pytestmark = pytest.mark.no_vulkan


RNG = np.random.default_rng(20240917)


def f32(*shape: int, span: float = 1.0) -> np.ndarray:
    return RNG.uniform(-span, span, shape).astype(np.float32)


def step_of(
    runs: list[Run], outputs: list[int] | None = None, n_vocab: int = 9, mix: Mix = Mix.DECODE
) -> StepParams:
    step = StepParams()
    step.fill(RNG.integers(0, n_vocab, sum(run.n_rows for run in runs)), runs, outputs or [], mix)
    return step


def test_embed_gathers_tokens_and_zeroes_the_rest() -> None:
    w, y = f32(9, 6), np.full((5, 6), np.nan, np.float32)
    step = step_of([Run(0, 0, 3, 0)])
    step.rows[:3, 2] = 4, 9, 0
    twins.rows.embed(w, w, y, step, n_embd=6, n_vocab=9, n_rows=5, ids=0)
    np.testing.assert_array_equal(y, [w[4], np.zeros(6), w[0], np.zeros(6), np.zeros(6)])


def test_embed_in_pieces_equals_embed() -> None:
    w = f32(9, 6)
    step = step_of([Run(0, 0, 4, 0)], outputs=[3, 1])
    for ids in (0, 1):
        whole, pieces = np.full((2, 5, 6), np.nan, np.float32)
        twins.rows.embed(w, w, whole, step, n_embd=6, n_vocab=9, n_rows=5, ids=ids)
        for a, b in ((0, 4), (4, 9)):
            twins.rows.embed(w[a:b], w, pieces, step, n_embd=6, n_vocab=b - a, n_rows=5, ids=ids, first=a)
        np.testing.assert_array_equal(whole, pieces)
    np.testing.assert_array_equal(whole[:2], w[[3, 1]])


def test_rms_norm_has_unit_mean_square() -> None:
    x, w, y = f32(3, 50), f32(50), np.empty((3, 50), np.float32)
    twins.rows.rms_norm(x, x, y, n=50, n_rows=3, eps=0.0, has_w=0)
    np.testing.assert_allclose(np.mean(y.astype(np.float64) ** 2, axis=1), 1, rtol=1e-6)
    weighted = np.empty_like(y)
    twins.rows.rms_norm(x, w, weighted, n=50, n_rows=3, eps=0.0)
    np.testing.assert_allclose(weighted, y * w, rtol=1e-6)
    twins.rows.rms_norm(x, w, y, n=50, n_rows=3, eps=0.25, has_w=0)
    assert y[1, 7] == pytest.approx(
        x[1, 7] / math.sqrt(sum(float(v) ** 2 for v in x[1]) / 50 + 0.25), rel=1e-6
    )


def test_mat_vec_by_scalars() -> None:
    w, x, b, y = f32(3, 5), f32(2, 5), f32(3), np.full(20, np.nan, np.float32)
    twins.matrix.mat_vec(w, x, b, y, k=5, n=3, n_rows=2, y_stride=10, has_bias=1)
    for r in range(2):
        for i in range(3):
            want = math.fsum([*(float(w[i, j]) * float(x[r, j]) for j in range(5)), float(b[i])])
            assert y[10 * r + i] == pytest.approx(want, rel=1e-6)
    assert np.isnan(y).sum() == 20 - 6
    assert twins.twin_of("mat_lane") is twins.matrix.mat_vec


@pytest.mark.parametrize("half_split", [0, 1])
def test_rope_is_a_complex_product(half_split: int) -> None:
    x, y = f32(2, 3, 10), np.empty((2, 3, 10), np.float32)
    angle = RNG.uniform(-4, 4, (2, 3))
    cos_sin = np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)
    twins.attention.rope(x, x, cos_sin, y, n_heads=3, head_dim=10, n_rot=6, n_rows=2, half_split=half_split)
    for r in range(2):
        for h in range(3):
            for i in range(3):
                a, b = (i, i + 3) if half_split else (2 * i, 2 * i + 1)
                turned = complex(x[r, h, a], x[r, h, b]) * np.exp(1j * angle[r, i])
                assert complex(y[r, h, a], y[r, h, b]) == pytest.approx(turned, rel=1e-5, abs=1e-6)
    np.testing.assert_array_equal(y[..., 6:], x[..., 6:])
    in_place = x.copy()
    twins.attention.rope(
        in_place,
        in_place,
        cos_sin,
        in_place,
        n_heads=3,
        head_dim=10,
        n_rot=6,
        n_rows=2,
        half_split=half_split,
    )
    np.testing.assert_array_equal(in_place, y)


CELLS = np.array([[3, 0], [4, 1]], np.uint32)  # two slots of 64 positions share 5 blocks


def cell(slot: int, pos: int) -> int:
    return int(CELLS[slot][pos // 32]) * 32 + pos % 32


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_kv_store(dtype: type) -> None:
    x = f32(4, 6)
    cache: np.ndarray = np.full((160, 6), np.nan, dtype)
    step = step_of([Run(1, 0, 2, 31), Run(0, 2, 1, 5)])
    twins.attention.kv_store(x, x, x, CELLS, cache, step, width=6, n_rows=4, blocks_per_slot=2)
    want = {cell(1, 31): 0, cell(1, 32): 1, cell(0, 5): 2}
    for at in range(160):
        if at in want:
            np.testing.assert_array_equal(cache[at], x[want[at]].astype(dtype))
        else:
            assert np.isnan(cache[at]).all(), at


@pytest.mark.parametrize("half_split", [False, True])
def test_kv_load_moves_and_rotates(half_split: bool) -> None:
    """Rows that were stored at positions 30 to 33 are read for positions 5 to 8, and rotated as `rope`
    rotates rows."""
    x, cos_sin = f32(4, 16), f32(4, 3, 2)
    cache: np.ndarray = np.full((160, 16), np.nan, np.float32)
    sizes = {"width": 16, "n_rows": 4, "blocks_per_slot": 2}
    twins.attention.kv_store(x, x, x, CELLS, cache, step_of([Run(1, 0, 4, 30)]), **sizes)
    step = step_of([Run(1, 0, 4, 5)])
    step.rows[:4, 2] = np.arange(30, 34)
    y, want = np.full((2, 4, 16), np.nan, np.float32)
    how = {"head_dim": 8, "n_rot": 6, "half_split": int(half_split)}
    twins.attention.kv_load(cache, CELLS, cos_sin, y, step, **sizes, **how)
    twins.attention.rope(x, x, cos_sin, want, n_heads=2, n_rows=4, **how)
    np.testing.assert_array_equal(y, want)


def attention_by_scalars(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    n_kv: int,
    kv_heads: list[int],
    scale: float,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Compute attention for one row. q is [heads, head_k], k is [keys, n_kv * head_k], v is [keys, n_kv *
    head_v]."""
    n_heads, head_k, head_v = len(q), q.shape[1], v.shape[1] // n_kv
    out = np.zeros((n_heads, head_v))
    for h, g in enumerate(kv_heads):
        scores = [
            scale * float(q[h].astype(float) @ row[g * head_k : (g + 1) * head_k]) for row in k.astype(float)
        ]
        weights = [math.exp(softcap * math.tanh(s / softcap) if softcap else s) for s in scores]
        total = math.fsum([*weights, *([] if sinks is None else [math.exp(sinks[h])])])
        for w, row in zip(weights, v.astype(float), strict=True):
            out[h] += w / total * row[g * head_v : (g + 1) * head_v]
    return out


@pytest.mark.parametrize(("q_first", "kv_heads"), [(0, [0, 0, 1, 1]), (1, [0, 1, 1])])
@pytest.mark.parametrize("n_splits", [1, 2, 3])
@pytest.mark.parametrize(
    ("window", "chunk", "softcap", "has_sinks"),
    [(0, 0, 0.0, 0), (1, 0, 0.5, 1), (3, 0, 0.0, 1), (33, 0, 2.0, 0), (0, 4, 0.0, 1), (0, 16, 2.0, 0)],
)
def test_attention(
    n_splits: int, q_first: int, kv_heads: list[int], window: int, chunk: int, softcap: float, has_sinks: int
) -> None:
    """Attention ignores keys after the position, and keys before the window or chunk. A sink counts once."""
    heads, n_kv, head_k, head_v, rows = len(kv_heads), 2, 8, 16, 6
    runs = [Run(1, 0, 3, 31), Run(0, 3, 1, 0), Run(0, 4, 1, 1)]
    step = step_of(runs)
    alone = step_of(runs, mix=Mix.PREFILL)
    q = f32(rows, heads, head_k, span=2)
    k, v = f32(160, n_kv * head_k), f32(160, n_kv * head_v).astype(np.float16)
    common = {"n_heads": heads, "n_rows": rows}
    kv: dict[str, Any] = {
        "n_kv": n_kv,
        "group": 2,
        "q_first": q_first,
        "blocks_per_slot": 2,
        "scale": 0.3,
        "window": window,
        "chunk": chunk,
        "softcap": softcap,
        "head_k": head_k,
        "head_v": head_v,
    }
    sinks = f32(heads, span=2)
    prefill = np.full((rows, heads, head_v), np.nan, np.float32)
    for head in range(heads):
        mask = {"first_head": head, "groups": (1, 1, 1), "has_sinks": has_sinks, "causal": 1}
        twins.attention.attn_prefill(q, k, v, CELLS, sinks, sinks, prefill, alone, **common, **kv, **mask)
    part = np.full((rows, heads, n_splits, head_v + 2), np.nan, np.float32)
    twins.attention.attn_decode(q, k, v, CELLS, sinks, sinks, part, step, **common, **kv, n_splits=n_splits)
    decode = np.full_like(prefill, np.nan)
    shape = {"n_splits": n_splits, "head_v": head_v, "has_sinks": has_sinks}
    twins.attention.attn_combine(part, sinks, decode, **common, **shape)
    if n_splits == 1:
        final = np.full_like(prefill, np.nan)
        how = {"n_splits": 1, "final": 1, "has_sinks": has_sinks}
        twins.attention.attn_decode(q, k, v, CELLS, sinks, sinks, final, step, **common, **kv, **how)
        np.testing.assert_allclose(final, decode, rtol=1e-6, atol=1e-7)
    for run in runs:
        for i in range(run.n_rows):
            row, pos = run.first_row + i, run.first_pos + i
            seen = [p for p in range(pos + 1) if not window or pos - p < window]
            at = [cell(run.slot, p) for p in seen if not chunk or p // chunk == pos // chunk]
            extra = softcap, sinks if has_sinks else None
            want = attention_by_scalars(q[row], k[at], v[at], n_kv, kv_heads, 0.3, *extra)
            np.testing.assert_allclose(prefill[row], want, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(decode[row], want, rtol=1e-5, atol=1e-6)
    assert not prefill[5:].any() and not decode[5:].any()


def test_glu() -> None:
    gate, up = f32(60, span=20), f32(60, span=9)
    y = np.empty(60, np.float32)

    def sigmoid(x: float) -> float:
        return 0.5 * (1 + math.tanh(x / 2))

    def gelu(x: float) -> float:
        return 0.5 * x * math.erfc(-x / math.sqrt(2))

    wants = {
        "none": (lambda g, u: g * u, 1e-6),
        "silu": (lambda g, u: g * sigmoid(g) * u, 1e-6),
        "gelu": (lambda g, u: gelu(g) * u, 5e-3),
        "sigmoid": (lambda g, u: sigmoid(g) * u, 1e-6),
        "swiglu_oai": (lambda g, u: min(g, 7) * sigmoid(1.702 * min(g, 7)) * (1 + max(-7, min(u, 7))), 1e-5),
        "gelu_alone": (lambda g, u: gelu(g), 5e-3),
        "relu2_alone": (lambda g, u: max(g, 0) ** 2, 1e-5),
        "silu_alone": (lambda g, u: g * sigmoid(g), 1e-6),
        "gelu_erf_alone": (lambda g, u: gelu(g), 1e-6),
        "gelu_quick_alone": (lambda g, u: g * sigmoid(1.702 * g), 1e-6),
        "relu": (lambda g, u: max(g, 0) * u, 1e-5),
        "sigmoid_alone": (lambda g, u: sigmoid(g), 1e-6),
    }
    assert tuple(wants) == ACTS
    for act, (want, tolerance) in enumerate(wants.values()):
        twins.elementwise.glu(gate, up, y, n=60, act=act)
        np.testing.assert_allclose(
            y, [want(*map(float, pair)) for pair in zip(gate, up, strict=True)], atol=tolerance
        )


def test_xielu() -> None:
    x, y = f32(60, span=4), np.empty(60, np.float32)
    x[:3] = 0, -1e-3, -0.25
    how = {"alpha_p": 0.75, "alpha_n": 1.5, "beta": 0.5, "eps": -0.01}
    twins.elementwise.xielu(x, y, n=60, **how)
    for got, v in zip(y.tolist(), x.tolist(), strict=True):
        want = 0.75 * v * v if v > 0 else 1.5 * (math.exp(min(v, -0.01)) - 1 - v)
        assert math.isclose(got, want + 0.5 * v, rel_tol=1e-6, abs_tol=1e-7), v


def test_add_scale_and_softcap() -> None:
    a, b, y = f32(40, span=200), f32(40), np.empty(40, np.float32)
    twins.elementwise.add(a, b, y, n=40)
    np.testing.assert_array_equal(y, a + b)
    twins.elementwise.scale(a, y, n=40, c=0.25)
    np.testing.assert_array_equal(y, a / 4)
    twins.elementwise.softcap(a, y, n=40, c=30.0)
    e = np.exp(2 * a.astype(float) / 30)
    np.testing.assert_allclose(y, 30 * (e - 1) / (e + 1), rtol=1e-6)


def test_add_partials() -> None:
    residual, partial, slots, w = f32(2, 4), f32(2, 4), f32(3, 11), f32(4)
    slots[1] = np.nan
    h, y = np.empty((2, 2, 4), np.float32)
    push: dict[str, Any] = {
        "n": 4,
        "n_rows": 2,
        "n_slots": 3,
        "own_index": 2,
        "slot_stride": 11,
        "writers": 0b101,
        "eps": 1e-5,
    }
    twins.rows.add_partials(residual, partial, slots, w, h, y, **push)
    want = residual + (slots[0, :8].reshape(2, 4) + partial)
    np.testing.assert_array_equal(h, want)
    norm = np.empty_like(y)
    twins.rows.rms_norm(want, w, norm, n=4, n_rows=2, eps=1e-5)
    np.testing.assert_array_equal(y, norm)
    y[:] = 7
    twins.rows.add_partials(residual, partial, slots, w, h, y, **push, has_residual=0, has_norm=0)
    np.testing.assert_array_equal(h, slots[0, :8].reshape(2, 4) + partial)
    assert (y == 7).all()
