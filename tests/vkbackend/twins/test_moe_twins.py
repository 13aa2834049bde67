"""The twins of expert ops and of the bfloat16 wire equal independent formulas and SPIR-V."""

from __future__ import annotations

import math
import shutil
from typing import Any

import gguf
import numpy as np
import pytest

from vkbackend import shaderlib, twins
from vkbackend.buffer import Buffer, Home, View
from vkbackend.limits import Limits
from vkbackend.ops import Recorder
from vkbackend.recording import Dispatch, Recording
from vkbackend.twins import moe

pytestmark = pytest.mark.no_vulkan


RNG = np.random.default_rng(20250611)


def f32(*shape: int, span: float = 1.0) -> np.ndarray:
    return RNG.uniform(-span, span, shape).astype(np.float32)


def nan(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


# ---- router ----


@pytest.mark.parametrize("n_embd", [1, 31, 32, 33, 131])
def test_moe_logits_uses_the_stated_order_of_operations(n_embd: int) -> None:
    h, w_norm, w, logits = f32(3, n_embd, span=50), f32(n_embd), f32(5, n_embd), nan(3, 5)
    twins.moe.moe_logits(h, w_norm, w, logits, n_embd=n_embd, n_experts=5, n_rows=3)
    for r in range(3):
        for e in range(5):
            lanes = [np.float32(0)] * 32
            for k in range(n_embd):
                lanes[k % 32] = lanes[k % 32] + h[r, k] * (w_norm[k] * w[e, k])
            while len(lanes) > 1:
                half = len(lanes) // 2
                lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
            assert logits[r, e].tobytes() == lanes[0].tobytes()
    np.testing.assert_allclose(logits, h.astype(float) @ (w * w_norm).T.astype(float), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("op", "functions"), [("moe_logits", set()), ("moe_topk", {8, 37, 40})])
def test_choices_never_fuse_a_multiply_with_its_add(op: str, functions: set[int]) -> None:
    """Float multiplies and adds have the decoration NoContraction. The only other float operations are
    negation, floor, min and max."""
    if shutil.which(shaderlib.COMPILER) is None:
        pytest.skip(f"no {shaderlib.COMPILER} (apt install glslang-tools)")
    negate, f_add, f_sub, f_mul, umin, umax, no_contraction = 127, 129, 131, 133, 38, 41, 42
    other_arithmetic = {136, 140, 141, *range(142, 149)}
    words = np.frombuffer(shaderlib.spirv(op, "f32"), np.uint32)
    exact, results, at = set(), [], 5
    while at < len(words):
        count, code = int(words[at]) >> 16, int(words[at]) & 0xFFFF
        operands = words[at + 1 : at + count].tolist()
        if code == 71 and operands[1] == no_contraction:
            exact.add(operands[0])
        elif code in (f_add, f_sub, f_mul):
            results.append(operands[1])
        assert code not in other_arithmetic, f"opcode {code} computes with floats"
        assert code != negate or functions, "OpFNegate"
        assert code != 12 or operands[3] in {umin, umax, *functions}, f"OpExtInst {operands[3]}"
        at += count
    assert len(results) >= 4 and set(results) <= exact


# ---- choice and weights ----


def topk(logits: np.ndarray, h: np.ndarray, n_used: int, **push: Any) -> tuple[np.ndarray, np.ndarray]:
    n_rows, n_experts = logits.shape
    ids, weights = np.full((n_rows, n_used), 99, np.uint32), nan(n_rows, n_used)
    vectors = {name: push.pop(name, nan(n_experts)) for name in ("bias", "select", "gain")}
    push = {
        "eps": 0.5,
        "scale": 1.0,
        "logit_scale": 1.0,
        "norm_w": 0,
        "per_id": 1,
        "softcap": 0.0,
        "n_groups": 1,
        "n_groups_used": 1,
    } | push
    push |= {"n_embd": h.shape[1], "n_experts": n_experts, "n_used": n_used, "n_rows": n_rows}
    push |= {f"has_{name}": int(not np.isnan(v).any()) for name, v in vectors.items()}
    twins.moe.moe_topk(logits, h, *vectors.values(), ids, weights, **push)
    return ids, weights


def softmax(values: list[float]) -> list[float]:
    parts = [math.exp(v) for v in values]
    return [p / math.fsum(parts) for p in parts]


def formula(logits: np.ndarray, h: np.ndarray, n_used: int, **p: Any) -> tuple[list[int], list[float]]:
    """Compute one row in float64 by the papers' formulas (Mixtral; DeepSeek-V3 2.1.2, arXiv:2412.19437)."""
    n = len(logits)
    rms = math.sqrt(math.fsum(float(v) ** 2 for v in h) / len(h) + 0.5)
    router = [
        p.get("logit_scale", 1.0) * float(logits[e]) / rms + float(p.get("bias", [0] * n)[e])
        for e in range(n)
    ]
    gating = p.get("gating", 0)
    prob = [softmax(router), [1 / (1 + math.exp(-v)) for v in router], router][gating]
    decides = [prob[e] + float(p.get("select", [0] * n)[e]) for e in range(n)]
    size = n // p.get("n_groups", 1)
    groups = [decides[g : g + size] for g in range(0, n, size)]
    best = sorted(range(len(groups)), key=lambda g: -sum(sorted(groups[g])[-2:]))[: p.get("n_groups_used", 1)]
    ids = sorted((e for e in range(n) if e // size in best), key=lambda e: -decides[e])[:n_used]
    weights = [prob[e] for e in ids]
    if gating == 2:
        weights = softmax(weights)
    total = max(sum(weights), 2.0**-14) if p.get("norm_w") else 1.0
    gain = p.get("gain", [1.0] * n)
    return ids, [w / total * p.get("scale", 1.0) * float(gain[e]) for w, e in zip(weights, ids, strict=True)]


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("vectors", [(), ("bias",), ("select",), ("bias", "select", "gain")], ids=str)
@pytest.mark.parametrize("gating", range(3))
def test_moe_topk(gating: int, vectors: tuple[str, ...], groups: tuple[int, int]) -> None:
    logits, h = f32(6, 12, span=9), f32(6, 20, span=3)
    push: dict[str, Any] = {name: f32(12, span=0.5) for name in vectors}
    push |= {"gating": gating, "n_groups": groups[0], "n_groups_used": groups[1]}
    push |= {"norm_w": len(vectors) % 2, "scale": 2.5, "logit_scale": 0.75}
    ids, weights = topk(logits, h, 3, **dict(push))
    for r in range(6):
        want_ids, want = formula(logits[r], h[r], 3, **push)
        assert ids[r].tolist() == want_ids
        np.testing.assert_allclose(weights[r], want, rtol=2e-6)


@pytest.mark.parametrize("norm_w", [0, 1])
def test_ties_go_to_the_lower_id_and_zeros_are_equal(norm_w: int) -> None:
    logits, h = np.round(f32(4, 9, span=3)).astype(np.float32), f32(4, 20, span=3)
    logits[2] = 0.0
    logits[2, ::2] = -0.0
    ids, weights = topk(logits, h, 3, norm_w=norm_w)
    for r in range(4):
        want = [e for _, e in sorted((-float(v), e) for e, v in enumerate(logits[r]))][:3]
        assert ids[r].tolist() == want
        np.testing.assert_allclose(weights[r], formula(logits[r], h[r], 3, norm_w=norm_w)[1], rtol=1e-6)


def test_small_sums_are_not_scaled_up() -> None:
    """The sum of the sigmoids of -20 is less than 2^-14, so the weights are divided by 2^-14."""
    _, weights = topk(
        np.full((1, 4), -20.0, np.float32), np.ones((1, 8), np.float32), 2, gating=1, norm_w=1, eps=0.0
    )
    np.testing.assert_allclose(weights, 2.0**14 / (1 + math.exp(20)), rtol=1e-6)


@pytest.mark.parametrize("gating", range(3))
@pytest.mark.parametrize("groups", [1, 3])
def test_moe_topk_of_nan_stays_in_range(gating: int, groups: int) -> None:
    logits = nan(2, 6)
    logits[0, 4] = -5.0
    ids, weights = topk(logits, f32(2, 3), 6 if groups == 1 else 2, gating=gating, n_groups=groups, norm_w=1)
    if groups == 1:
        assert ids.tolist() == [[4, 0, 1, 2, 3, 5], [0, 1, 2, 3, 4, 5]]
    assert (ids < 6).all() and all(len(set(row)) == len(row) for row in ids.tolist())
    assert np.isnan(weights).all()


def test_exact_functions_are_accurate() -> None:
    x = np.concatenate([f32(2000, span=80), f32(2000), np.array([-80, 0, 80], np.float32)])
    positive = np.exp(f32(4000, span=40).astype(np.float64)).astype(np.float32)
    wide = x.astype(np.float64)
    for got, want in (
        (moe.exact_exp(x), np.exp(wide)),
        (moe.exact_sigmoid(x), 1 / (1 + np.exp(-wide))),
        (moe.exact_reciprocal(positive), 1 / positive.astype(np.float64)),
        (moe.exact_inverse_sqrt(positive), positive.astype(np.float64) ** -0.5),
    ):
        np.testing.assert_allclose(got, want, rtol=5e-7)
    ends = np.array([-1e30, -200, 200, np.nan], np.float32)
    assert (np.diff(moe.exact_exp(ends)[:3]) >= 0).all() and np.isnan(moe.exact_sigmoid(ends)[3])


def test_order_does_not_change_with_the_norm_of_the_row() -> None:
    h, w_norm, w, logits = f32(6, 64, span=9), f32(64), f32(16, 64), nan(6, 16)
    twins.moe.moe_logits(h, w_norm, w, logits, n_embd=64, n_experts=16, n_rows=6)
    normed = h / np.sqrt(np.mean(h.astype(float) ** 2, axis=1, keepdims=True) + 1e-6) * w_norm
    np.testing.assert_array_equal(np.argsort(logits), np.argsort(normed @ w.T.astype(float)))


# ---- experts ----


@pytest.mark.parametrize("x_per_used", [False, True])
def test_slices_of_experts_sum_to_the_experts(x_per_used: bool) -> None:
    """Each of two devices holds some columns of each expert. The numbers of columns differ."""
    n_embd, n_ff, n_experts, rows = 6, 7, 3, 2
    gate, down = f32(n_experts, n_ff, n_embd), f32(n_experts, n_embd, n_ff)
    ids = np.array([[2, 0], [1, 2]], np.uint32)
    x = f32(rows, 2, n_embd) if x_per_used else f32(rows, n_embd)
    cuts = [3, 0, 5]
    total = np.zeros((rows, 2, n_embd))
    for device in (0, 1):
        spans = [(0, cut) if device == 0 else (cut, n_ff) for cut in cuts]
        starts = np.concatenate([[0], np.cumsum([e - b for b, e in spans])]).astype(np.uint32)
        up = np.concatenate([gate[i, b:e].reshape(-1) for i, (b, e) in enumerate(spans)])
        back = np.concatenate([down[i, :, b:e].reshape(-1) for i, (b, e) in enumerate(spans)])
        hidden, y = nan(rows, 2, 9), nan(rows, 2, n_embd)
        push = {"side": n_embd, "first": 0, "count": 3, "n_used": 2, "n_rows": rows}
        twins.moe.mat_vec_id(
            up, x, ids, starts, hidden, **push, x_stride=n_embd, y_stride=9, x_per_used=x_per_used, axis=0
        )
        twins.moe.mat_vec_id(
            back, hidden, ids, starts, y, **push, x_stride=9, y_stride=n_embd, x_per_used=1, axis=1
        )
        for r in range(rows):
            for u in range(2):
                begin, end = spans[ids[r, u]]
                np.testing.assert_allclose(
                    hidden[r, u, : end - begin],
                    gate[ids[r, u], begin:end].astype(float) @ (x[r, u] if x_per_used else x[r]),
                    rtol=1e-5,
                    atol=1e-6,
                )
                assert np.isnan(hidden[r, u, end - begin :]).all()
        total += y
    for r in range(rows):
        for u in range(2):
            e = ids[r, u]
            want = down[e].astype(float) @ (gate[e].astype(float) @ (x[r, u] if x_per_used else x[r]))
            np.testing.assert_allclose(total[r, u], want, rtol=1e-5, atol=1e-5)


def test_pieces_of_a_stack_write_their_own_experts() -> None:
    w, x, starts = f32(9, 4), f32(1, 4), np.array([0, 2, 5, 9], np.uint32)
    ids, whole, pieces = np.array([[2, 0, 1]], np.uint32), nan(1, 3, 4), nan(1, 3, 4)
    push = {"side": 4, "n_used": 3, "n_rows": 1, "x_stride": 4, "y_stride": 4, "x_per_used": 0}
    twins.moe.mat_vec_id(w, x, ids, starts, whole, **push, first=0, count=3)
    twins.moe.mat_vec_id(w[2:], x, ids, starts, pieces, **push, first=1, count=2)
    assert np.isnan(pieces[0, 1]).all()
    twins.moe.mat_vec_id(w[:2], x, ids, starts, pieces, **push, first=0, count=1)
    np.testing.assert_array_equal(pieces, whole)


def test_moe_sum_and_add_bias() -> None:
    x, weights, y = f32(2, 3, 4), f32(2, 3), nan(2, 4)
    twins.moe.moe_sum(x, weights, y, n=4, n_used=3, n_rows=2)
    want = [
        [math.fsum(float(weights[r, u]) * float(x[r, u, i]) for u in range(3)) for i in range(4)]
        for r in (0, 1)
    ]
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-7)
    b, z = f32(4), nan(2, 4)
    twins.elementwise.add_bias(y, b, z, n=4, n_rows=2)
    np.testing.assert_array_equal(z, np.stack([y[0] + b, y[1] + b]))


# ---- bfloat16 ----


def test_pack_bf16_rounds_like_the_file_format() -> None:
    special = np.array([1e-45, 3.4028235e38, np.inf, -np.inf, 0.0, -0.0], np.float32)
    x = np.concatenate([special, f32(55), f32(40, span=1e30)])
    x[-1:] = np.array([0x7F800001], np.uint32).view(np.float32)
    y = np.full(51, 0xFFFFFFFF, np.uint32)
    twins.rows.pack_bf16(x, y, n=101)
    values = gguf.quants.dequantize(y.view(np.uint8), gguf.GGMLQuantizationType.BF16)
    want = gguf.quants.dequantize(
        gguf.quants.quantize(x, gguf.GGMLQuantizationType.BF16), gguf.GGMLQuantizationType.BF16
    )
    np.testing.assert_array_equal(values[:101].view(np.uint32), want.view(np.uint32))
    assert np.isnan(values[100]) and values.view(np.uint32)[101] == 0
    finite = np.isfinite(want)
    np.testing.assert_allclose(want[finite], x[finite], rtol=2.0**-8, atol=1e-40)


def test_add_partials_over_bf16_is_equal_on_both_sides() -> None:
    n, shares = 7, f32(2, 7)
    slots = np.full((2, 6), 0xFFFFFFFF, np.uint32)
    for s in (0, 1):
        twins.rows.pack_bf16(shares[s], slots[s, :4], n=n)
    sums = []
    for own_index in (0, 1):
        h, mine = nan(1, n), slots.copy()
        mine[own_index] = 0xFFFFFFFF
        twins.rows.add_partials(
            h, shares[own_index], mine, h, h, h, n=n, n_rows=1, n_slots=2, own_index=own_index, slot_stride=6,
            writers=3, eps=0.0, has_residual=0, has_norm=0, wire=1,
        )  # fmt: skip
        sums.append(h.tobytes())
    rounded = slots[:, :4].copy().view(np.uint16)[:, :n].astype(np.uint32) << 16
    want = rounded.view(np.float32)[0] + rounded.view(np.float32)[1]
    assert sums[0] == sums[1] == want.tobytes()
    assert np.abs(want - shares.sum(axis=0)).max() <= 2 * 2.0**-9 * np.abs(shares).max()


# ---- recording ----


def recorded(device: Limits, rows: int) -> Dispatch:
    buffer = Buffer(1 << 20, Home.SCRATCH, "b")
    recording = Recording("r")
    views = [View(buffer, 0, shape) for shape in ((rows, 64), (64,), (8, 64), (rows, 8))]
    Recorder(recording, device).moe_logits(*views)
    (dispatch,) = recording.accesses()
    assert isinstance(dispatch, Dispatch)
    return dispatch


def test_order_of_the_logits_does_not_depend_on_the_device() -> None:
    devices = Limits(), Limits(is_cpu=True), Limits(max_invocations=1024, subgroup_size=64)
    assert {dict(recorded(device, rows).consts)["LOCAL"] for device in devices for rows in (1, 2, 512)} == {
        32
    }
