"""The metadata and tensors of a tiny random model, written as GGUF. The name of a tensor seeds its random
values. Weights do not depend on the order of tensors, and are not stored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import numpy as np

N_VOCAB = 128
N_CTX = 64
PROMPT = np.random.default_rng(48).integers(0, N_VOCAB, 48).tolist()
N_STEERED = 8
N_PREFILL = 40  # prompt tokens of the first batch, before 8 batches of one token


@dataclass
class Fixture:
    """A model. The names in `keys` lack the architecture's prefix."""

    name: str
    arch: str
    keys: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    unread: tuple[str, ...] = ()  # prefixes of tensors that do not change the logits
    alone: str = ""
    unsteered: tuple[int, ...] = ()  # layers after which llama.cpp adds no control vector

    def normal(self, name: str, *shape: int) -> np.ndarray:
        rng = np.random.default_rng(crc32(f"{self.name} {name}".encode()))
        return rng.normal(size=shape).astype(np.float32)

    def put(self, name: str, values: np.ndarray) -> None:
        assert name not in self.tensors, name
        self.tensors[name] = np.ascontiguousarray(values, np.float32)

    def matrix(self, name: str, *shape: int, gain: float = 1.0, bias: bool = False) -> None:
        self.put(f"{name}.weight", self.normal(name, *shape) * np.float32(gain / np.sqrt(shape[-1])))
        if bias:
            self.bias(name, *shape[:-1])

    def bias(self, name: str, *shape: int, scale: float = 0.5) -> None:
        self.put(f"{name}.bias", self.normal(f"{name}.bias", *shape) * np.float32(scale))

    def norm(self, name: str, n: int) -> None:
        self.put(f"{name}.weight", 1 + np.float32(0.3) * self.normal(name, n))

    @property
    def n_layer(self) -> int:
        return self.keys["block_count"] - self.keys.get("nextn_predict_layers", 0)

    def steering(self) -> dict[int, np.ndarray]:
        n_embd = self.keys["embedding_length"]
        return {il: 0.3 * self.normal(f"direction.{il}", n_embd) for il in range(1, self.n_layer)}

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[name]


Q8_0, MXFP4 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.MXFP4
# Quantized files store these tensors, and all vectors, in F32.
KEPT = re.compile(r"\.bias$|ffn_gate_inp|ssm_(conv1d|a$|d$)|_lerp_|_norm\.|^rope_")


def quantized(name: str, values: np.ndarray) -> np.ndarray | None:
    if values.ndim < 2 or values.shape[-1] % 32 or KEPT.search(name):
        return None
    blocks: np.ndarray = gguf.quants.quantize(values, Q8_0)
    return blocks


def write_steering(fixture: Fixture, path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "controlvector")
    for il, direction in fixture.steering().items():
        writer.add_tensor(f"direction.{il}", direction)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write(
    fixture: Fixture,
    path: Path,
    quantize: bool = False,
    blocks: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """Write the model without a vocabulary. `blocks` holds encoded tensors. `quantize` stores all matrices
    outside `blocks` as Q8_0."""
    writer = gguf.GGUFWriter(path, fixture.arch)
    vocabulary = {} if fixture.arch == "clip" else {"tokenizer.ggml.model": "none", "vocab_size": N_VOCAB}
    for key, value in {**vocabulary, **fixture.keys}.items():
        name = key if key.startswith(("xielu.", "tokenizer.", "general.")) else f"{fixture.arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif key.startswith(("ple.head_", "ple.layer_mult")):
            of_words = gguf.GGUFValueType.UINT64
            writer.add_key_value(name, list(value), gguf.GGUFValueType.ARRAY, sub_type=of_words)
        else:
            writer.add_array(name, list(value))
    for name, values in fixture.tensors.items():
        if stored := (blocks or {}).get(name):
            writer.add_tensor(name, stored[0], raw_dtype=stored[1])
        elif quantize and (blocks_of := quantized(name, values)) is not None:
            writer.add_tensor(name, blocks_of, raw_dtype=Q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
