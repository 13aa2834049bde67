"""Control vectors on one device and on three produce the same logits as the numpy forward pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from control_vectors import write_vectors
from device_sets import DEVICE_SETS, nmse, only, product
from llama_float64 import forward
from oracles.fixture import PROMPT as LONG_PROMPT
from oracles.fixture import write
from oracles.fixtures import FIXTURES, build
from runners import load_runner
from tiny_models import Tiny, write_tiny

from vkbackend.errors import GGUFError, InvalidArgument, StateError, VkbackendError
from vkbackend.meta.step_kind import StepKind
from vkbackend.models.architectures.reading import read_n_layer
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.llm import LLM
from vkbackend.models.perplexity import log_softmax, windows
from vkbackend.models.placement.control_vectors import read_control_vectors
from vkbackend.models.text.tokenizer import Tokenizer
from vkbackend.step import Run
from vkbackend.tools.cli import main

N_LAYER, N_EMBD, N_CTX = 4, 64, 32
PROMPT = LONG_PROMPT[:16]
TINY = [Tiny("llama"), Tiny("qwen2", "Q8_0"), Tiny("qwen3"), Tiny("qwen3moe", n_expert=8)]


def directions(layers: range = range(1, N_LAYER), seed: int = 0, size: float = 0.5) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {il: (size * rng.normal(size=N_EMBD)).astype(np.float32) for il in layers}


def run(path: Path, devices: list[str], files: list[tuple[str, float]] | None = None, **options: Any) -> Any:
    options = {
        "n_ctx": N_CTX,
        "n_ubatch": N_CTX,
        "type_k": "f32",
        "type_v": "f32",
        "reduce_type": "f32",
    } | options
    runner = load_runner(path, devices=devices, control_vectors=files or (), **options)
    try:
        n = len(PROMPT) - 1
        first = runner.step(PROMPT[:n], [Run(0, 0, n, 0)], range(n)).copy()
        return np.concatenate([first, runner.step(PROMPT[n:], [Run(0, 0, 1, n)], [0]).copy()])
    finally:
        runner.close()
        assert all(not d.counts for d in runner.mesh.devices)


# ---- effect ----


@pytest.mark.parametrize(("tiny", "n"), only(product(TINY, [3, 1]), f"{TINY[0]}-3", f"{TINY[3]}-1"))
def test_equals_the_numpy_forward(tmp_path: Path, tiny: Tiny, n: int) -> None:
    path, vectors = write_tiny(tmp_path / "model.gguf", tiny), directions()
    file = write_vectors(tmp_path / "control.gguf", vectors)
    want = forward(path, PROMPT, control={il: -1.5 * v.astype(float) for il, v in vectors.items()})
    assert nmse(run(path, ["numpy"] * n, [(str(file), -1.5)]), want) <= 1e-10
    assert nmse(forward(path, PROMPT), want) > 1e-2


@pytest.mark.parametrize("devices", only([p for p in DEVICE_SETS if p.id in ("0", "0,0,0", "0,1")], "0,0,0"))
def test_equals_the_numpy_forward_on_vulkan(tmp_path: Path, devices: list[str]) -> None:
    path, vectors = write_tiny(tmp_path / "model.gguf", TINY[0]), directions()
    file = write_vectors(tmp_path / "control.gguf", vectors)
    want = forward(path, PROMPT, control={il: v.astype(float) for il, v in vectors.items()})
    assert nmse(run(path, devices, [(str(file), 1.0)]), want) <= 1e-6


@pytest.mark.parametrize("n", [1, pytest.param(3, marks=pytest.mark.wide)])
@pytest.mark.parametrize("name", only(FIXTURES, "gemma4", "cohere2moe+rms", "mamba2"))
def test_a_zero_vector_equals_none_bit_by_bit(tmp_path: Path, name: str, n: int) -> None:
    fixture = build(name)
    path, width = write(fixture, tmp_path / "model.gguf"), fixture.keys["embedding_length"]
    with GGUF.open(path) as gguf:
        n_layer = read_n_layer(gguf)
    zero = write_vectors(tmp_path / "zero.gguf", {il: np.zeros(width, "f4") for il in range(1, n_layer)})
    none = run(path, ["numpy"] * n)
    assert np.array_equal(run(path, ["numpy"] * n, [(str(zero), 1.0)]), none)


def test_files_add_up_and_a_range_excludes_layers(tmp_path: Path) -> None:
    a, b = directions(seed=1), directions(range(2, N_LAYER), seed=2)
    files = [
        (str(write_vectors(tmp_path / "a.gguf", a)), 2.0),
        (str(write_vectors(tmp_path / "b.gguf", b)), -0.25),
    ]
    sums = read_control_vectors(files, N_LAYER, N_EMBD)
    assert list(sums) == [1, 2, 3] and np.array_equal(sums[1], 2 * a[1])
    assert np.allclose(sums[3], 2 * a[3].astype(float) - 0.25 * b[3].astype(float), rtol=1e-6)
    some = read_control_vectors(files, N_LAYER, N_EMBD, (2, 2))
    assert list(some) == [2] and np.array_equal(some[2], sums[2])


def test_no_exchange_is_added(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model.gguf", TINY[0])
    file = write_vectors(tmp_path / "control.gguf", directions())
    counts = []
    for files in ([], [(str(file), 1.0)]):
        runner = load_runner(path, devices=["numpy"] * 3, n_ctx=32, n_ubatch=8, control_vectors=files)
        counts.append([len(runner.mesh.recorded_step(StepKind.of_run(rows, 1)).reduces) for rows in (1, 8)])
        runner.close()
    assert counts[0] == counts[1] == [2 * N_LAYER] * 2


def test_a_layer_of_other_devices(tmp_path: Path) -> None:
    path, vectors = write_tiny(tmp_path / "model.gguf", TINY[0]), directions()
    files = [(str(write_vectors(tmp_path / "control.gguf", vectors)), 1.0)]
    single = run(path, ["numpy"], files)
    for options in ({"split_mode": "layer"}, {"tensor_split": (1, 0, 1)}, {"n_gpu_layers": 2}):
        assert nmse(run(path, ["numpy"] * 3, files, **options), single) <= 1e-9


# ---- public interfaces ----


def test_llm_and_command_line(tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = models / "stories-narrow-F32.gguf"
    file = write_vectors(tmp_path / "control.gguf", directions(range(1, 5), size=2.0))
    how: dict[str, Any] = {"devices": ["numpy"], "n_ctx": 64, "n_ubatch": 32}
    with LLM(path, **how, control_vectors=[(file, 0.5), file], control_vector_layer_range=(2, 4)) as llm:
        want = llm.generate("Once", max_tokens=8, temperature=0).tokens
        llm.save_state(tmp_path / "state.safetensors", slot=0)
    with LLM(path, **how) as llm:
        assert llm.generate("Once", max_tokens=8, temperature=0).tokens != want
        with pytest.raises(StateError, match="the model it was saved with"):
            llm.load_state(tmp_path / "state.safetensors", slot=0)
    flags = ["--control-vector-scaled", f"{file}:0.5", "--control-vector", str(file)]
    flags += ["--control-vector-layer-range", "2", "4"]
    words = ["generate", "-m", str(path), "-p", "Once", "-n", "8", "--temp", "0", "-dev", "numpy", "-c", "64"]
    assert main([*words, "-ub", "32", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == want


@pytest.mark.wide
def test_perplexity_equals_the_numpy_forward(
    tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, text = models / "stories-narrow-F32.gguf", models / "stories.txt"
    vectors = {il: 4 * v for il, v in directions(range(1, 5)).items()}
    a, b = (str(write_vectors(tmp_path / name, vectors)) for name in ("a.gguf", "b.gguf"))
    words = [
        "perplexity",
        "-m",
        str(path),
        "-f",
        str(text),
        "-dev",
        "numpy,numpy",
        "-c",
        "32",
        "--chunks",
        "2",
    ]
    words += ["-ctk", "f32", "-ctv", "f32", "--json"]
    ppl = []
    for flags in ([], ["--control-vector", f"{a},{b}", "--control-vector-scaled", f"{a}:-0.5,{b}:-0.5"]):
        assert main([*words, *flags]) == 0
        ppl.append(json.loads(capsys.readouterr().out)["ppl"])
    with GGUF.open(path) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf)
    nll: list[float] = []
    for window in windows(tokenizer.encode(text.read_text(encoding="utf-8")), 32, tokenizer.bos_id, 2):
        logp = log_softmax(forward(path, window, control={il: v.astype(float) for il, v in vectors.items()}))
        nll += (-logp[np.arange(16, 31), window[17:]]).tolist()
    assert ppl[1] == pytest.approx(np.exp(np.mean(nll)), rel=1e-5) and ppl[1] > 1.1 * ppl[0]


@pytest.mark.parametrize("command", ["generate", "bench", "sweep", "perplexity"])
def test_commands_accept_control_vectors(
    tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path, text = str(models / "stories-narrow-Q8_0.gguf"), str(models / "stories.txt")
    words = [
        command,
        "-m",
        path,
        "-dev",
        "numpy",
        *(["-f", text, "-c", "32"] if command == "perplexity" else []),
    ]
    assert main([*words, "--control-vector", path]) == 2
    assert "expected control vectors" in capsys.readouterr().err
    assert main([*words, "--control-vector-layer-range", "1", "2"]) == 2
    assert "without control vectors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("vectors", "layers", "error", "message"),
    [
        ({1: np.ones(63, "f4")}, None, GGUFError, r"direction.1 is f32 \(63,\)"),
        ({1: np.ones(64, "f2")}, None, GGUFError, r"direction.1 is f16"),
        ({0: np.ones(64, "f4")}, None, GGUFError, r"direction.0 is .* \(N from 1\)"),
        ({4: np.ones(64, "f4")}, None, GGUFError, r"direction.4, but the model's layers are 0..3"),
        ({"other": np.ones(64, "f4")}, None, GGUFError, "other is .* expected direction.N"),
        ({}, None, GGUFError, "no tensor direction.N"),
        ({1: np.ones(64, "f4")}, (2, 1), InvalidArgument, "layers 2 to 1: expected .* in 0..3"),
        ({1: np.ones(64, "f4")}, (1, 4), InvalidArgument, "layers 1 to 4"),
        ({1: np.ones(64, "f4")}, (1,), InvalidArgument, "the first and the last layer"),
        ({1: np.ones(64, "f4")}, "1 2", InvalidArgument, "the first and the last layer"),
    ],
)
def test_refusals(
    tmp_path: Path, vectors: Any, layers: Any, error: type[VkbackendError], message: str
) -> None:
    path = write_tiny(tmp_path / "model.gguf", TINY[0])
    file = write_vectors(tmp_path / "control.gguf", vectors)
    with pytest.raises(error, match=message):
        LLM(path, devices=["numpy"], control_vectors=[file], control_vector_layer_range=layers)


def test_unsuitable_files_are_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model.gguf", TINY[0])
    with pytest.raises(GGUFError, match="is a llama model, expected control vectors"):
        LLM(path, devices=["numpy"], control_vectors=[path])
    with pytest.raises(InvalidArgument, match="without control vectors"):
        LLM(path, devices=["numpy"], control_vector_layer_range=(1, 2))
    for files in ("file.gguf", [3], [("file.gguf", "x")], [("file.gguf", float("nan"))], 3):
        with pytest.raises(InvalidArgument, match=r"control|path"):
            LLM(path, devices=["numpy"], control_vectors=files)  # type: ignore[arg-type]
    for word in ("file.gguf", ":2", "file.gguf:x"):
        words = ["generate", "-m", str(path), "-dev", "numpy", "--control-vector-scaled", word]
        assert main(words) == 2
