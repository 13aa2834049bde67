"""Random low-rank adapters of the oracles' fixtures, their files, and the merged models."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf as gguf_py
import numpy as np
from oracles.fixture import Fixture
from safetensors.numpy import save_file

Pairs = dict[str, tuple[np.ndarray, np.ndarray]]
DENSE = r"blk\.\d+\.(attn_q|attn_k|attn_v|attn_qkv|attn_output|ffn_gate|ffn_up|ffn_down)\.weight"
EXPERTS = r"blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.weight"
ALPHA = 8.0


def random_pairs(fixture: Fixture, rank: int, pattern: str = DENSE, seed: int = 1) -> Pairs:
    rng, pairs = np.random.default_rng((seed, rank)), {}
    for name, w in fixture.tensors.items():
        if re.fullmatch(pattern, name):
            a = rng.normal(size=(*w.shape[:-2], rank, w.shape[-1])) / w.shape[-1] ** 0.5
            b = 0.3 * rng.normal(size=(*w.shape[:-1], rank))
            pairs[name] = a.astype(np.float32), b.astype(np.float32)
    assert pairs, f"{fixture.name} has no tensor {pattern}"
    return pairs


def write_adapter(
    path: Path,
    arch: str,
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]],
    alpha: float | None = ALPHA,
    dtype: Any = np.float32,
    invocation: Sequence[int] = (),
    kind: str = "lora",
) -> Path:
    writer = gguf_py.GGUFWriter(path, arch)
    writer.add_type(gguf_py.GGUFType.ADAPTER)
    writer.add_string(gguf_py.Keys.Adapter.TYPE, kind)
    if alpha is not None:
        writer.add_float32(gguf_py.Keys.Adapter.LORA_ALPHA, alpha)
    if invocation:
        writer.add_array("adapter.alora.invocation_tokens", list(invocation))
    for name, (a, b) in pairs.items():
        writer.add_tensor(f"{name}.lora_a", a.astype(dtype))
        writer.add_tensor(f"{name}.lora_b", b.astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merged(fixture: Fixture, chosen: Sequence[tuple[Pairs, float]], alpha: float = ALPHA) -> Fixture:
    """Return the merged model, whose weights are W + scale * alpha / rank * B A for each (pairs, scale)."""
    model = copy.copy(fixture)
    model.tensors = dict(fixture.tensors)
    for pairs, scale in chosen:
        for name, (a, b) in pairs.items():
            factor = np.float64(scale) * alpha / a.shape[-2]
            total = model.tensors[name] + factor * (b.astype(np.float64) @ a.astype(np.float64))
            model.tensors[name] = total.astype(np.float32)
    return model


def write_peft(
    folder: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any] | None = None
) -> Path:
    """Write tensors such as model.layers.0.self_attn.q_proj.lora_A as a PEFT adapter."""
    folder.mkdir()
    named = {f"base_model.model.{name}.weight": np.ascontiguousarray(v) for name, v in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    known = {"peft_type": "LORA", "r": 4, "lora_alpha": ALPHA, "bias": "none", "use_rslora": False}
    (folder / "adapter_config.json").write_text(json.dumps(known | dict(config or {})), encoding="utf-8")
    return folder
