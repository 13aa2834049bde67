"""Tiny random models of every architecture, written with gguf-py. Their biases and norms change the
logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from newer_types import ggml_type

from vkbackend import shaderlib
from vkbackend.formats import block_of, row_nbytes
from vkbackend.tools.op_cases.setup import weights


@dataclass(frozen=True)
class Tiny:
    """The shape of a tiny model. By default, it has four layers, 8 q heads, 2 kv heads, heads wider than
    n_embd / 8, and three blocks of FFN columns."""

    arch: str
    dtype: str = "F32"
    n_expert: int = 0
    n_used: int = 2
    tied: bool = False  # if true, groups of three router rows are equal except for rounding
    n_layer: int = 4
    n_embd: int = 64
    n_head: int = 8
    n_head_kv: int = 2
    head_dim: int = 16
    n_ff: int = 96
    n_vocab: int = 128
    keys: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __repr__(self) -> str:
        return f"{self.arch}-{self.dtype}" + (f"-{self.n_expert}x" if self.n_expert else "")


def tensors(tiny: Tiny) -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(tiny.seed)
    t = tiny
    q, kv = t.n_head * t.head_dim, t.n_head_kv * t.head_dim

    def matrix(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

    def vector(n: int, mean: float = 1.0) -> np.ndarray:
        return (mean + 0.3 * rng.normal(size=n)).astype(np.float32)

    yield "token_embd.weight", matrix(t.n_vocab, t.n_embd) * 8
    yield "output_norm.weight", vector(t.n_embd)
    yield "output.weight", matrix(t.n_vocab, t.n_embd)
    for il in range(t.n_layer):
        linears = {
            "attn_q": (q, t.n_embd),
            "attn_k": (kv, t.n_embd),
            "attn_v": (kv, t.n_embd),
            "attn_output": (t.n_embd, q),
        }
        if not t.n_expert:
            linears |= {
                "ffn_gate": (t.n_ff, t.n_embd),
                "ffn_up": (t.n_ff, t.n_embd),
                "ffn_down": (t.n_embd, t.n_ff),
            }
        for name, shape in linears.items():
            yield f"blk.{il}.{name}.weight", matrix(*shape)
            if t.arch != "qwen3":
                yield f"blk.{il}.{name}.bias", vector(shape[0], 0.0)
        norms = {"attn_norm": t.n_embd, "ffn_norm": t.n_embd}
        if t.arch.startswith("qwen3"):
            norms |= {"attn_q_norm": t.head_dim, "attn_k_norm": t.head_dim}
        for name, n in norms.items():
            yield f"blk.{il}.{name}.weight", vector(n)
        if t.n_expert:
            router = matrix(t.n_expert, t.n_embd)
            if t.tied:
                router = router[np.arange(t.n_expert) // 3 * 3]
                noise = 1 + 2.0**-23 * rng.integers(-1, 2, router.shape)
                router = (router * np.where(np.arange(t.n_expert)[:, None] < 3, 1, noise)).astype(np.float32)
            yield f"blk.{il}.ffn_gate_inp.weight", router
            for name in ("gate", "up"):
                yield f"blk.{il}.ffn_{name}_exps.weight", matrix(t.n_expert, t.n_ff, t.n_embd)
            yield f"blk.{il}.ffn_down_exps.weight", matrix(t.n_expert, t.n_embd, t.n_ff)


def write_tiny(
    path: Path,
    tiny: Tiny,
    change: Mapping[str, np.ndarray | None] | None = None,
    types: Mapping[str, str] | None = None,
) -> Path:
    """Write the model. `change` replaces and adds tensors, and None removes a tensor. Each tensor in `types`
    consists of random blocks of its type, or floats if the type has no blocks."""
    t = tiny
    writer = gguf.GGUFWriter(path, t.arch)
    keys: dict[str, Any] = {
        "block_count": t.n_layer,
        "context_length": 256,
        "embedding_length": t.n_embd,
        "feed_forward_length": t.n_ff,
        "attention.head_count": t.n_head,
        "attention.head_count_kv": t.n_head_kv,
        "attention.key_length": t.head_dim,
        "attention.value_length": t.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1000.0,
    }
    if t.n_expert:
        keys |= {"expert_count": t.n_expert, "expert_used_count": t.n_used}
    if t.arch == "qwen3moe":
        keys |= {"expert_feed_forward_length": t.n_ff, "feed_forward_length": 4 * t.n_ff}
    for key, value in (keys | dict(t.keys)).items():
        add = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}.get(type(value))
        if add:
            add(f"{t.arch}.{key}", value)
    kind = gguf.GGMLQuantizationType[t.dtype]
    changed: dict[str, np.ndarray | None] = dict(tensors(t)) | dict(change or {})
    for name, values in changed.items():
        if values is None:
            continue
        if stored := (types or {}).get(name):
            raw = stored_as(stored, values)
            writer.add_tensor(name, raw, raw_dtype=ggml_type(stored))
            continue
        is_matrix = values.ndim > 1 and "ffn_gate_inp" not in name and values.dtype == np.float32
        if is_matrix and t.dtype != "F32":
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_as(dtype: str, values: np.ndarray) -> np.ndarray:
    """Return the values in the type `dtype`, as uint8 [..., row bytes]. For types with blocks, the result is
    random blocks of similar size. For types without a shader, the result is zeros."""
    if dtype not in shaderlib.weight_types():
        raw = np.zeros((*values.shape[:-1], row_nbytes(dtype, values.shape[-1])), np.uint8)
    elif block_of(dtype)[0] == 1:
        raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[dtype.upper()])
    else:
        rng = np.random.default_rng(values.size)
        filled = weights(rng, dtype, *values.shape, scale=2 * float(values.std())).raw
        assert filled is not None
        raw = filled
    return np.ascontiguousarray(raw).view(np.uint8).reshape(*values.shape[:-1], -1)
