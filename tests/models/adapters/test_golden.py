"""Adapters produce the same logits as PEFT with transformers, and as llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import ALPHA as ADAPTER_ALPHA
from adapters import DENSE, EXPERTS, random_pairs, write_adapter
from device_sets import nmse, wide
from oracles.fixture import write
from oracles.fixtures import build
from oracles.peft_cases import ALPHA, CASES, INVOCATION, PROMPT, RANK, PeftCase, values
from places import GOLDEN
from runners import F32
from safetensors.numpy import save_file

from vkbackend import LLM

pytestmark = pytest.mark.no_vulkan

BOUND = 1e-10  # NMSE of f32 logits; transformers and llama.cpp add in another order
OF_LLAMA_CPP = {
    "llama": f"{DENSE}|output\\.weight",
    "qwen3": DENSE,
    "phi3": DENSE,
    "cohere2": DENSE,
    "llama+experts": f"{DENSE}|{EXPERTS}",
    "qwen3moe": f"{DENSE}|{EXPERTS}",
    "gpt-oss": EXPERTS,
}


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(GOLDEN / "adapters.npz") as file:
        return {name: file[name] if name != "about" else json.loads(str(file[name])) for name in file.files}


def peft_folder(folder: Path, case: PeftCase, shapes: dict[str, tuple[int, ...]]) -> Path:
    folder.mkdir()
    tensors = {name: values(name, tuple(shape)) for name, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", **case.config}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def logits(path: Path, n_devices: int, **options: Any) -> np.ndarray:
    devices = {"devices": ["numpy"] * n_devices, "tensor_split": [1] * n_devices}
    with LLM(path, **{"n_ctx": 32, **devices, **F32, **options}) as llm:
        return llm.logits(PROMPT)


QUICK = ("llama activated", "qwen3 patterns", "phi3")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else wide(pytest.param(name, id=name)) for name in CASES]
)
def test_peft(golden: dict[str, Any], tmp_path: Path, name: str) -> None:
    case, want = CASES[name], golden[f"peft {name}"]
    model = write(build(case.fixture), tmp_path / "model.gguf")
    folder = peft_folder(tmp_path / "adapter", case, golden["about"]["shapes"][name])
    got = logits(model, 2, lora=folder)
    assert nmse(got, want) <= BOUND
    base = logits(model, 1)
    assert nmse(base, want) > 1e-3
    if case.config.get("alora_invocation_tokens"):
        start = PROMPT.index(INVOCATION[0])
        assert nmse(got[:start], base[:start]) <= BOUND and nmse(got[start:], base[start:]) > 1e-3


@pytest.mark.parametrize(
    "name",
    [name if name in ("llama", "qwen3moe") else wide(pytest.param(name, id=name)) for name in OF_LLAMA_CPP],
)
def test_llama_cpp(golden: dict[str, Any], tmp_path: Path, name: str) -> None:
    got = with_two_adapters(name, tmp_path, ADAPTER_ALPHA)
    assert nmse(got, golden[f"llama.cpp {name}"]) <= BOUND


def test_llama_cpp_without_alpha(golden: dict[str, Any], tmp_path: Path) -> None:
    """in this case llama.cpp does not divide by the rank"""
    got = with_two_adapters("llama", tmp_path, None)
    assert nmse(got, golden["llama.cpp without alpha"]) <= BOUND
    assert nmse(got, golden["llama.cpp llama"]) > 1e-3


def with_two_adapters(name: str, folder: Path, alpha: float | None) -> np.ndarray:
    """Return the logits with two GGUF adapters of ranks 4 and 6, with the scales 1 and -0.25."""
    fixture = build(name)
    files = [
        write_adapter(
            folder / f"{rank}.gguf", fixture.arch, random_pairs(fixture, rank, OF_LLAMA_CPP[name]), alpha
        )
        for rank in (4, 6)
    ]
    model = write(fixture, folder / "model.gguf")
    # llama.cpp ran with this n_ctx, which selects phi3's RoPE factors.
    return logits(model, 2, n_ctx=64, lora=[files[0], (files[1], -0.25)])
