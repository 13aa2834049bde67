"""qwen2, qwen3, qwen3moe and llama with experts produce the same logits as llama.cpp, float64 numpy, and one
device."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS, covering, nmse, only, product, wide
from llama_float64 import forward
from material import shared_models
from prefills import TOKENS, opened, prefill
from tiny_models import Tiny, tensors, write_tiny

from vkbackend.buffer import Home
from vkbackend.errors import GGUFError, UnsupportedModel, VkbackendError
from vkbackend.limits import Limits
from vkbackend.meta.step_kind import StepKind, bucket
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.recording import Copy
from vkbackend.step import Run
from vkbackend.twins.device import NumpyDevice

FILES = [  # MXFP4: test_weight_formats.py
    "stories-moe8x-Q4_0", "stories-qwen2-Q8_0",
    *shared_models("stories260K-moe8x-Q4_0", "stories260K-qwen2-Q8_0"),
]  # fmt: skip
N_GREEDY = 12  # tokens to compare with llama.cpp
NEAR = 0.05  # if two logits differ by less, rounding may reorder them
DENSE = [Tiny("qwen2", keys={"attention.sliding_window": 256}), Tiny("qwen3", "Q8_0"), Tiny("llama", "F16")]
MIXED = [
    Tiny("qwen3moe", "Q8_0", n_expert=10, n_used=3, keys={"expert_weights_scale": 2.5}),
    Tiny("qwen3moe", n_expert=8),
    Tiny("llama", "Q4_0", n_expert=8, keys={"expert_gating_func": 1}),
]
TIED = Tiny("qwen3moe", "Q8_0", n_expert=12, tied=True)
SPLITS = [
    (2, None), (2, (3, 1)), (2, (1, 0)), (3, None), (3, (5, 3, 2)), (3, (0, 1, 1)), (4, None), (5, None),
    (8, None),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


_single: dict[str, np.ndarray] = {}


def model(folder: Path, tiny: Tiny) -> Path:
    path = folder / f"{tiny!r}{'-tied' if tiny.tied else ''}.gguf"
    return path if path.exists() else write_tiny(path, tiny)


def on_one(path: Path, cache: str = "f32") -> np.ndarray:
    key = f"{path.name} {cache}"
    if key not in _single:
        with opened(path, ["numpy"], type_k=cache, type_v=cache) as runner:
            _single[key] = prefill(runner)
    return _single[key]


# ---- files of trained models ----


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "devices", "shares"),
    product(
        FILES, [pytest.param(["numpy"] * 3, (5, 3, 2), id="5:3:2"), pytest.param(["numpy"], None, id="1")]
    ),
)
def test_logits_and_greedy_tokens_of_llama_cpp(
    models: Path, name: str, devices: list[str], shares: tuple[int, ...] | None
) -> None:
    check_expected(models, name, devices, shares)


@pytest.mark.parametrize(
    ("name", "devices"),
    only(product(FILES, [p for p in DEVICE_SETS if p.id in ("0", "0,0")]), "stories-moe8x-Q4_0-0"),
)
def test_logits_and_greedy_tokens_on_vulkan(models: Path, name: str, devices: list[str]) -> None:
    check_expected(models, name, devices, None)


def check_expected(models: Path, name: str, devices: list[str], shares: tuple[int, ...] | None) -> None:
    expected = json.loads((models / "expected.json").read_text(encoding="utf-8"))[name]
    want = np.load(models / "expected_logits.npz")[name]
    prompt, greedy = expected["prompt_tokens"], expected["greedy_tokens"][:N_GREEDY]
    with opened(models / f"{name}.gguf", devices, tensor_split=shares, n_ubatch=64) as runner:
        logits = prefill(runner, prompt)
        assert nmse(logits, want) <= 1e-3
        # After llama.cpp's previous tokens, the logit of its next token must be close to the largest logit.
        if expected["min_margin"] <= NEAR:
            later = runner.step(
                greedy[:-1], [Run(0, 0, len(greedy) - 1, len(prompt))], range(len(greedy) - 1)
            )
            after = np.concatenate([logits[-1:], later])
            assert (after.max(axis=1) - after[np.arange(len(greedy)), greedy]).max() <= NEAR
            return
        tokens = [int(logits[-1].argmax())]
        for i in range(len(greedy) - 1):
            tokens.append(int(runner.step(tokens[-1:], [Run(0, 0, 1, len(prompt) + i)], [0])[0].argmax()))
        assert tokens == greedy


# ---- comparison with float64, and of several devices with one ----


@pytest.mark.parametrize("tiny", [*DENSE, *MIXED], ids=repr)
def test_equals_float64_numpy(folder: Path, tiny: Tiny) -> None:
    path = model(folder, tiny)
    assert nmse(on_one(path), forward(path, TOKENS)) <= 1e-11


@pytest.mark.parametrize(
    ("tiny", "n", "shares"),
    only(
        product([*DENSE, *MIXED], [pytest.param(3, (5, 3, 2), id="5:3:2"), pytest.param(2, None, id="2")]),
        f"{DENSE[0]}-2",
        f"{MIXED[0]}-2",
        f"{MIXED[1]}-5:3:2",
    ),
)
def test_n_devices_equal_one(folder: Path, tiny: Tiny, n: int, shares: tuple[int, ...] | None) -> None:
    check_devices(model(folder, tiny), n, shares)


@pytest.mark.wide
@pytest.mark.parametrize("tiny", [*DENSE, *MIXED], ids=repr)
@pytest.mark.parametrize("policy", ["balanced", "llama.cpp"])
@pytest.mark.parametrize("cache", ["f32", "f16"])
@pytest.mark.parametrize(("n", "shares"), SPLITS)
def test_every_split_equals_one_device(
    folder: Path, tiny: Tiny, n: int, shares: tuple[int, ...] | None, cache: str, policy: str
) -> None:
    check_devices(model(folder, tiny), n, shares, cache, split_policy=policy)


@pytest.mark.wide
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("cache", ["f32", "f16"])
@pytest.mark.parametrize(("n", "shares"), SPLITS)
def test_every_split_of_a_trained_model_equals_one_device(
    models: Path, name: str, n: int, shares: tuple[int, ...] | None, cache: str
) -> None:
    check_devices(models / f"{name}.gguf", n, shares, cache)


def check_devices(
    path: Path, n: int, shares: tuple[int, ...] | None, cache: str = "f32", **options: Any
) -> None:
    options |= {"tensor_split": shares, "type_k": cache, "type_v": cache}
    with opened(path, ["numpy"] * n, **options) as runner:
        want, bound = on_one(path, cache), 1e-9 if cache == "f32" else 1e-6
        assert nmse(prefill(runner), want) <= bound
        for arena in runner.mesh.steps.arenas:
            arena.host[:] = 0xFF
        again = runner.step(TOKENS[-1:], [Run(0, 0, 1, len(TOKENS) - 1)], [0])
        assert nmse(again, want[-1:]) <= bound


@pytest.mark.parametrize(
    ("tiny", "devices"),
    only(
        product(
            [MIXED[0], Tiny("qwen2"), Tiny("qwen3", "Q8_0")],
            [p for p in DEVICE_SETS if p.id in ("0", "0,0,0", "0,1")],
        ),
        f"{MIXED[0]}-0,0,0",
        "qwen2-F32-0",
    ),
)
def test_vulkan_equals_numpy(folder: Path, tiny: Tiny, devices: list[str]) -> None:
    path = model(folder, tiny)
    with opened(path, devices, keep_values=True) as runner:
        assert nmse(prefill(runner), on_one(path)) <= 1e-6
        if tiny.n_expert:
            assert [ids.tolist() for ids in chosen(runner)] == [i.tolist() for i in on_numpy(path)]


@pytest.mark.wide
@pytest.mark.parametrize("tiny", [Tiny("qwen2"), MIXED[0]], ids=repr)
@pytest.mark.parametrize("devices", [p for p in DEVICE_SETS if p.id == "0,0,0"])
def test_devices_of_a_driver_equal_one(folder: Path, tiny: Tiny, devices: list[str]) -> None:
    path = model(folder, tiny)
    with opened(path, devices[:1]) as single, opened(path, devices) as several:
        assert nmse(prefill(several), prefill(single)) <= 1e-9


# ---- experts ----


def chosen(runner: Runner, n_rows: int = len(TOKENS)) -> list[np.ndarray]:
    """Return, for each layer, the experts that the last prefill chose, [n_rows, n_used]. All devices must
    have chosen the same experts."""
    rows = bucket(n_rows)
    values = runner.mesh.recorded_step(StepKind.of_run(rows, rows)).values
    layers = []
    for il in range(runner.model.n_layer):
        views = values[f"blk.{il}.moe_ids"]
        choices = [
            device.read(view).view(np.uint32).reshape(view.shape)[:n_rows]
            for device, view in zip(runner.mesh.devices, views, strict=True)
            if view is not None
        ]
        assert choices and all(np.array_equal(ids, choices[0]) for ids in choices), (
            f"layer {il} chose differently"
        )
        layers.append(choices[0])
    return layers


def on_numpy(path: Path) -> list[np.ndarray]:
    with opened(path, ["numpy"], keep_values=True) as runner:
        prefill(runner)
        return chosen(runner)


NUMPY_SETS = [pytest.param(["numpy"] * 3, id="numpy*3")]


@pytest.mark.parametrize(
    "devices", only(NUMPY_SETS + [p for p in DEVICE_SETS if p.id in ("0,0", "0,1")], "0,0")
)
def test_all_devices_break_near_ties_alike(folder: Path, devices: list[str]) -> None:
    """Rounding decides near ties, so the float64 model uses the experts that the devices chose."""
    path = model(folder, TIED)
    with opened(path, devices, keep_values=True) as runner:
        logits, ids = prefill(runner), chosen(runner)
    assert nmse(logits, forward(path, TOKENS, ids=ids)) <= 1e-6
    flat = np.stack(ids).reshape(-1, 2)
    assert np.ptp(flat // 3, 1).max() == 0, "both experts of a row are of one group of near ties"
    equal = flat[flat[:, 0] // 3 == 0]
    assert len(equal) and (equal == [0, 1]).all(), "equal logits: the lowest ids, in order"
    near = {tuple(pair) for pair in (flat[flat[:, 0] // 3 > 0] % 3).tolist()}
    assert len(near) > 2, "rounding decided nothing"


def test_widths_differ_by_expert_and_device(folder: Path) -> None:
    with opened(model(folder, MIXED[0]), ["numpy"] * 2) as runner:
        for plan in runner.layout.plans:
            widths = [[end - begin for begin, end in ranges] for ranges in plan.experts]
            assert all(len(set(of_device)) > 1 for of_device in zip(*widths, strict=True)), widths
            assert {sum(of_expert) for of_expert in widths} == {96}


def test_a_stack_in_several_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model(folder, MIXED[1])
    limits = Limits(max_storage_range=60_000)
    monkeypatch.setattr(
        "vkbackend.models.engine.runner.open_devices.NumpyDevice", lambda name: NumpyDevice(name, limits)
    )
    for n in (1, 2):
        with opened(path, ["numpy"] * n) as runner:
            pieces = runner.mesh.weights["blk.0.ffn_down_exps.weight"].pieces
            assert [len(of_device) for of_device in pieces] == ([4] if n == 1 else [2, 2])
            assert nmse(prefill(runner), on_one(path)) <= 1e-9


def test_a_device_without_columns_does_not_compute(folder: Path) -> None:
    path = model(folder, MIXED[0])
    options: dict[str, Any] = {"override_tensor": (("_exps", "1"),)}
    with opened(path, ["numpy"] * 3, keep_values=True, **options) as runner:
        assert nmse(prefill(runner), on_one(path)) <= 1e-9
        step = runner.mesh.recorded_step(StepKind.of_run(32, 32))
        assert [r.writers for r in step.reduces[1::2]] == [(1,)] * runner.model.n_layer
        for d, executable in enumerate(step.executables):
            ops = {getattr(c, "op", "copy") for c in executable.recording.commands}
            assert ({"moe_logits", "moe_topk", "moe_group", "mat_mul_id", "moe_sum"} <= ops) == (d == 1), ops


# ---- exchanges ----


@pytest.mark.parametrize(
    ("tiny", "rows"),
    [
        *covering([DENSE[0], MIXED[0]], [1, 16]),
        *map(wide, product([DENSE[1], MIXED[2]], [1, 16])),
    ],
)
def test_two_exchanges_of_n_embd_per_layer(folder: Path, tiny: Tiny, rows: int) -> None:
    """A layer exchanges 2 * n_embd values per row, also with a bias and with three experts per token."""
    with opened(model(folder, tiny), ["numpy"] * 3) as runner:
        step = runner.mesh.recorded_step(StepKind.of_run(rows, 1))
        assert [r.elements for r in step.reduces] == [rows * tiny.n_embd] * (2 * tiny.n_layer)
        for d, executable in enumerate(step.executables):
            sent = [
                c.dst.nbytes
                for c in executable.recording.commands
                if isinstance(c, Copy) and getattr(c.dst.buffer, "home", None) is Home.PAGES
            ]
            assert sent == [4 * rows * tiny.n_embd for r in step.reduces if d in r.writers]


# ---- refusals ----


def without(tiny: Tiny, *names: str) -> Mapping[str, None]:
    absent = {name: None for name, _ in tensors(tiny) if any(re.search(n, name) for n in names)}
    assert absent, names
    return absent


def ones(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


QWEN2, QWEN3, MOE = Tiny("qwen2"), Tiny("qwen3"), Tiny("qwen3moe", n_expert=8)
MIXTRAL = Tiny("llama", n_expert=8)
OFF, BAD = UnsupportedModel, GGUFError
REFUSED: list[tuple[str, Tiny, Mapping[str, np.ndarray | None], type[VkbackendError], str]] = [
    ("experts in qwen2", replace(QWEN2, n_expert=8), {}, OFF, "qwen2.expert_count = 8"),
    ("no experts in qwen3moe", replace(MOE, n_expert=0), {}, BAD, "qwen3moe.expert_count"),
    ("9 of 8", replace(MIXTRAL, n_used=9), {}, BAD, "expert_used_count is 9"),
    ("33 used", replace(MIXTRAL, n_expert=40, n_used=33), {}, OFF, "33 of 40 experts"),
    *(
        (key, replace(tiny, keys={key: value}), {}, OFF, f"{key} = {value}")
        for key, value, tiny in (
            ("expert_gating_func", 5, MOE),
            ("expert_used_count", 2, QWEN3),
            ("attention.sliding_window", 255, QWEN2),
        )
    ),
    (
        "more rotated than there is",
        replace(QWEN3, keys={"rope.dimension_count": 24}),
        {},
        BAD,
        "dimension_count is 24",
    ),
    (
        "frequency factors",
        QWEN2,
        {"rope_freqs.weight": ones(8)},
        OFF,
        "rope_freqs.weight is not supported for qwen2",
    ),
    ("no head norm", QWEN3, without(QWEN3, "2.attn_k_norm"), BAD, "'blk.2.attn_k_norm.weight' is missing"),
    ("head norm in qwen2", QWEN2, {"blk.0.attn_q_norm.weight": ones(16)}, OFF, "qwen2 does not use"),
    ("norms by head", QWEN3, {"blk.0.attn_q_norm.weight": ones(64)}, BAD, r"\(64,\), expected \(16,\)"),
    ("wide bias", QWEN2, {"blk.1.attn_k.bias": ones(64)}, BAD, r"attn_k.bias has shape \(64,\)"),
    ("router bias", MOE, {"blk.0.ffn_gate_inp.bias": ones(9)}, BAD, r"bias has shape \(9,\)"),
    (
        "expert bias",
        MIXTRAL,
        {"blk.0.ffn_up_exps.bias": ones(8, 95)},
        BAD,
        r"\(8, 95\), expected \(8, 96, 1\)",
    ),
    (
        "groups of three",
        replace(MOE, keys={"expert_group_count": 3, "expert_group_used_count": 1}),
        {},
        BAD,
        "from 1 of 3 groups",
    ),
    ("no groups used", replace(MOE, keys={"expert_group_count": 4}), {}, BAD, "expert_group_used_count"),
    ("no shared expert", replace(MOE, keys={"expert_shared_count": 1}), {}, BAD, "shexp.weight' is missing"),
    ("no dense layer", replace(MIXTRAL, keys={"leading_dense_block_count": 1}), {}, BAD, "missing"),
    ("no experts", MIXTRAL, without(MIXTRAL, "0.ffn_up_exps"), BAD, "ffn_up_exps.weight' is missing"),
    ("dense FFN too", MOE, {"blk.0.ffn_up.weight": ones(96, 64)}, OFF, "does not use: .*ffn_up.weight"),
]


@pytest.mark.parametrize(
    ("tiny", "change", "error", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_unsupported_features_are_refused(
    tmp_path: Path,
    tiny: Tiny,
    change: Mapping[str, np.ndarray | None],
    error: type[VkbackendError],
    message: str,
) -> None:
    path = write_tiny(tmp_path / "model.gguf", tiny, change)
    with pytest.raises(error, match=message), opened(path, ["numpy"]):
        pass
