"""Models in every weight format produce the same logits as llama.cpp and float64 numpy."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from device_sets import DEVICE_SETS, device_params, in_turn, nmse, only, product, some, wide
from gguf.constants import GGMLQuantizationType
from gguf_files import STRING, U32, payload, with_keys
from llama_float64 import forward
from material import shared_models
from oracles import llama_cpp
from prefills import TOKENS, opened, prefill
from runners import load_runner
from tiny_models import Tiny, tensors, write_tiny

from vkbackend import env, shaderlib
from vkbackend.device_info import DeviceInfo
from vkbackend.errors import UnsupportedModel
from vkbackend.formats import dequantize
from vkbackend.models.export import write_gguf
from vkbackend.models.gguf.reader import GGUF
from vkbackend.step import Run

TYPES = (
    "F32 BF16 F16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS IQ3_S IQ3_XXS IQ2_S IQ2_XS "
    "IQ2_XXS IQ1_S IQ1_M MXFP4 TQ1_0 TQ2_0"
).split()
FILES = [
    *(f"stories-w256-{name}" for name in TYPES), "stories-moe8x-MXFP4",
    *shared_models(*(f"stories260K-w256-{name}" for name in TYPES), "stories260K-moe8x-MXFP4"),
]  # fmt: skip
NUMPY = (["numpy"] * 3, (5, 3, 2))
SETS = {param.id: param for param in DEVICE_SETS}
USUAL = [  # other weight formats run only with --all, because compiling the shaders of a format takes seconds
    pytest.param(name, *SETS[dtype].values, id=f"{name}-{dtype}", marks=SETS[dtype].marks)
    for name, dtype in (
        ("stories-w256-Q4_K", "0"),
        ("stories-w256-Q6_K", "0,1"),
    )
]


def check_file(
    models: Path, name: str, devices: list[str], shares: tuple[int, ...] | None = None, n_greedy: int = 12
) -> None:
    """Check that the NMSE is at most 1e-6 relative to float64 numpy. Relative to llama.cpp, which rounds
    activations, it is at most 2e-3."""
    path = models / f"{name}.gguf"
    expected = json.loads((models / "expected.json").read_text(encoding="utf-8"))[name]
    prompt, greedy = expected["prompt_tokens"], expected["greedy_tokens"][:n_greedy]
    with opened(path, devices, tensor_split=shares) as runner:
        logits = prefill(runner, prompt)
        assert nmse(logits, forward(path, prompt)) <= 1e-6
        assert nmse(logits, np.load(models / "expected_logits.npz")[name]) <= 2e-3
        if expected["min_margin"] <= 0.05:
            return
        tokens = [int(logits[-1].argmax())]
        for i in range(len(greedy) - 1):
            tokens.append(int(runner.step(tokens[-1:], [Run(0, 0, 1, len(prompt) + i)], [0])[0].argmax()))
        assert tokens == greedy


@pytest.mark.parametrize("name", some(FILES, 4))
def test_files_in_numpy(models: Path, name: str) -> None:
    path = models / f"{name}.gguf"
    prompt = json.loads((models / "expected.json").read_text(encoding="utf-8"))[name]["prompt_tokens"]
    with opened(path, NUMPY[0], tensor_split=NUMPY[1]) as runner:
        logits = prefill(runner, prompt)
        assert nmse(logits, forward(path, prompt)) <= 1e-10
        assert nmse(logits, np.load(models / "expected_logits.npz")[name]) <= 2e-3


@pytest.mark.parametrize(("name", "devices"), USUAL)
def test_files(models: Path, name: str, devices: list[str]) -> None:
    check_file(models, name, devices)


SHARED = [
    *(pytest.param(*p.values, None, id=str(p.id), marks=p.marks) for p in DEVICE_SETS[1:]),
    *(pytest.param(["0"] * len(s), s, id=str(s)) for s in ((3, 1), (1, 0), (0, 1, 1), (5, 3, 2))),
]


@pytest.mark.wide
@pytest.mark.parametrize(("name", "devices", "shares"), in_turn(FILES, SHARED, 3))
def test_files_everywhere(
    models: Path, name: str, devices: list[str], shares: tuple[int, ...] | None
) -> None:
    check_file(models, name, devices, shares, n_greedy=48)


BEST = product(device_params(), ["best"])
PORTABLE = product(device_params(), ["portable"])
# A file runs on one driver with its best ops, and on the next driver with the portable ops.
DRIVERS = [way for both in zip(BEST, PORTABLE[1:] + PORTABLE[:1], strict=True) for way in both]


@pytest.mark.wide
@pytest.mark.parametrize(("name", "info", "features"), in_turn(FILES, DRIVERS, 2))
def test_files_on_every_driver(
    models: Path, name: str, info: DeviceInfo, features: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if features == "portable":
        monkeypatch.setenv("VKBACKEND_DISABLE", ",".join(env.FEATURES))
    check_file(models, name, [str(info.index)])


@pytest.mark.parametrize("name", only(FILES, "stories-moe8x-MXFP4"))
def test_export_equals_the_file(models: Path, tmp_path: Path, name: str) -> None:
    path = models / f"{name}.gguf"
    assert exported(path, tmp_path) == path.read_bytes()


def exported(path: Path, folder: Path) -> bytes:
    out = folder / "out.gguf"
    with opened(path, NUMPY[0], tensor_split=NUMPY[1]) as runner, GGUF.open(path) as source:
        write_gguf(out, source, runner.mesh.devices, runner.mesh.weights, runner.model.weights())
    return out.read_bytes()


# ---- all formats in one file ----

ALL = Tiny("llama", n_embd=256, n_head=8, n_head_kv=4, head_dim=64, n_ff=768)


@pytest.fixture(scope="module")
def all_formats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    types = cycle(shaderlib.weight_types())
    chosen = {name: next(types) for name, values in tensors(ALL) if values.ndim > 1}
    assert set(chosen.values()) == set(shaderlib.weight_types())
    return write_tiny(tmp_path_factory.mktemp("formats") / "all.gguf", ALL, types=chosen)


@pytest.mark.parametrize(("n", "shares"), [pytest.param(1, None, marks=pytest.mark.wide), (4, (5, 3, 0, 2))])
def test_all_formats_in_numpy(all_formats: Path, n: int, shares: tuple[int, ...] | None) -> None:
    with opened(all_formats, ["numpy"] * n, tensor_split=shares) as runner:
        assert nmse(prefill(runner), forward(all_formats, TOKENS)) <= 1e-10


@pytest.mark.wide
@pytest.mark.parametrize(
    "devices", [SETS["0"], pytest.param(["1"], id="1", marks=SETS["0,1"].marks), SETS["0,1"]]
)
def test_all_formats_on_vulkan(all_formats: Path, devices: list[str]) -> None:
    with opened(all_formats, devices) as runner:
        want = forward(all_formats, TOKENS)
        assert nmse(prefill(runner), want) <= 1e-6
        again = runner.step(TOKENS[-1:], [Run(0, 0, 1, len(TOKENS) - 1)], [0])
        assert nmse(again, want[-1:]) <= 1e-6


def test_export_of_all_formats_equals_the_file(all_formats: Path, tmp_path: Path) -> None:
    assert exported(all_formats, tmp_path) == all_formats.read_bytes()


# ---- matrices with a factor ----

SMALL = Tiny("llama", n_embd=64, n_head=4, n_head_kv=2, head_dim=64, n_ff=192)


def with_factors(folder: Path, tiny: Tiny) -> tuple[Path, Path]:
    """Write two models: one with NVFP4 matrices and factors, and one with the products of both in F32."""
    matrices = [name for name, values in tensors(tiny) if values.ndim > 1 and name.startswith("blk.")]
    rng = np.random.default_rng(1)
    factors = {name: rng.uniform(0.2, 1.5, 1).astype(np.float32) for name in matrices}
    change: dict[str, np.ndarray | None] = {}
    for name, factor in factors.items():
        change[name.replace(".weight", ".scale")] = factor
        change[name.replace(".weight", ".input_scale")] = rng.uniform(1, 2, 1).astype(np.float32)
    biases = {name: rng.normal(size=values.shape).astype(np.float32)
              for name, values in tensors(tiny) if name.endswith(".bias")}  # fmt: skip
    path = write_tiny(folder / "nvfp4.gguf", tiny, change | biases, dict.fromkeys(matrices, "nvfp4"))
    with GGUF.open(path) as gguf:
        products = {name: dequantize(gguf.data(name), "nvfp4", gguf.tensors[name].shape) * factors[name]
                    for name in matrices}  # fmt: skip
    return path, write_tiny(folder / "f32.gguf", tiny, biases | products)


@pytest.mark.parametrize("devices", [pytest.param(["numpy"] * 2, id="numpy"), *map(wide, DEVICE_SETS)])
def test_factors_of_matrices(tmp_path: Path, devices: list[str]) -> None:
    path, products = with_factors(tmp_path, SMALL)
    with opened(path, devices) as runner:
        assert nmse(prefill(runner), forward(products, TOKENS)) <= (1e-10 if "numpy" in devices else 1e-6)


@pytest.mark.oracle
def test_factors_of_matrices_in_llama_cpp(tmp_path: Path) -> None:
    # llama.cpp aborts if a matrix of an FFN has a factor and a bias. A qwen3 file has no bias.
    path, _ = with_factors(tmp_path, replace(SMALL, arch="qwen3"))
    values = {"tokenizer.ggml.model": (STRING, "no_vocab"), "qwen3.vocab_size": (U32, SMALL.n_vocab)}
    keys = {name: struct.pack("<I", kind) + payload(kind, v) for name, (kind, v) in values.items()}
    with GGUF.open(path) as gguf:
        for_llama_cpp = tmp_path / "keys.gguf"
        for_llama_cpp.write_bytes(with_keys(gguf, keys))
    with opened(path, ["numpy"]) as runner:
        assert nmse(prefill(runner), llama_cpp.logits(for_llama_cpp, [TOKENS], SMALL.n_vocab)) <= 2e-3


def test_factors_of_other_tensors_are_refused(tmp_path: Path) -> None:
    change = {"output.scale": np.ones(1, np.float32)}
    with pytest.raises(UnsupportedModel, match=r"does not use: output\.scale"):
        load_runner(write_tiny(tmp_path / "odd.gguf", SMALL, change), devices=["numpy"])


# ---- float formats that devices store as f32 ----


@pytest.mark.parametrize("dtype", only(["f16", "bf16"], "bf16"))
def test_norms_biases_and_routers_in_f16_and_bf16(tmp_path: Path, dtype: str) -> None:
    tiny = Tiny("qwen3moe", "Q8_0", n_expert=8)
    types = {name: dtype for name, values in tensors(tiny) if values.ndim == 1 or "ffn_gate_inp" in name}
    assert len(types) > 5 * tiny.n_layer
    path = write_tiny(tmp_path / "halves.gguf", tiny, types=types)
    for devices in (["numpy"], ["numpy"] * 3):
        with opened(path, devices) as runner:
            assert {runner.mesh.weights[name].dtype for name in types} == {"f32"}
            assert nmse(prefill(runner), forward(path, TOKENS)) <= 1e-10
    assert exported(path, tmp_path) == path.read_bytes()


@pytest.mark.parametrize(
    ("name", "dtype", "supported"),
    [
        ("blk.1.ffn_gate_inp.weight", "q8_0", "f32, f16, bf16"),
        ("blk.1.attn_q.weight", "q8_1", "f32, f16, bf16, q4_0"),
        ("blk.1.attn_q.weight", "i8", "f32, f16, bf16, q4_0"),
        ("blk.1.attn_norm.weight", "q8_0", "f32, f16, bf16"),
    ],
)
def test_unsupported_types_are_refused(tmp_path: Path, name: str, dtype: str, supported: str) -> None:
    if dtype.upper() not in GGMLQuantizationType.__members__:
        pytest.skip(f"this version of gguf has no {dtype}")
    path = write_tiny(tmp_path / "odd.gguf", Tiny("qwen3moe", n_expert=8), types={name: dtype})
    with pytest.raises(UnsupportedModel, match=f"{name} is {dtype}, expected {supported}"):
        load_runner(path, devices=["numpy"])
