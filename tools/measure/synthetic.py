"""Models of published shapes with random weights, for benchmarks without a file, such as `llama-8b:Q4_0`.

A `Synthetic` replaces an opened GGUF file. Every matrix uses the type in the model's name, or f16 if its rows
are not a multiple of the type's block. Norms and routers are f32.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from vkbackend.errors import InvalidArgument
from vkbackend.formats import block_of, row_nbytes
from vkbackend.models.architectures.registry import ENCODERS, load_model
from vkbackend.models.architectures.weight_specs import MATRIX_TYPES
from vkbackend.models.gguf.header import BOOL, SCALARS, STRING, TensorInfo
from vkbackend.models.gguf.reader import GGUF
from vkbackend.tools.op_cases.setup import weights

# The number of random weights of each type. Tensors repeat these weights from different offsets.
POOL_ELEMENTS = 1 << 20
_TYPE_OF = {int: 4, float: 6, bool: BOOL, str: STRING}


EPS = float(np.float32(1e-6))  # GGUF stores F32.


def _dense(
    n_layer: int, n_embd: int, n_head: int, n_head_kv: int, head_dim: int, n_ff: int
) -> dict[str, int]:
    return {
        "block_count": n_layer,
        "embedding_length": n_embd,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "feed_forward_length": n_ff,
        "context_length": 32_768,
    }


def _mixture(n_expert: int, n_used: int, n_ff: int, **dense: Any) -> dict[str, Any]:
    return dense | {
        "expert_count": n_expert,
        "expert_used_count": n_used,
        "expert_feed_forward_length": n_ff,
    }


_LATENT = _dense(61, 7168, 128, 1, 576, 18_432) | {
    "attention.value_length": 512,
    "attention.kv_lora_rank": 512,
    "attention.q_lora_rank": 1536,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "rope.dimension_count": 64,
    "leading_dense_block_count": 3,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "expert_group_count": 8,
    "expert_group_used_count": 4,
}
_GPT_OSS = _dense(36, 2880, 64, 8, 64, 2880) | {"context_length": 131_072, "attention.sliding_window": 128}
_QWEN35 = _dense(48, 3072, 32, 2, 256, 9216) | {
    "context_length": 262_144,
    "expert_shared_feed_forward_length": 1024,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 8192,
    "ssm.state_size": 128,
    "ssm.time_step_rank": 64,
    "ssm.group_count": 16,
    "full_attention_interval": 4,
    "rope.dimension_count": 64,
}
# name: (architecture, vocabulary, tied, hyper-parameters)
SHAPES: dict[str, tuple[str, int, bool, dict[str, Any]]] = {
    "llama-1b": ("llama", 128_256, True, _dense(16, 2048, 32, 8, 64, 8192)),
    "llama-3b": ("llama", 128_256, True, _dense(28, 3072, 24, 8, 128, 8192)),
    "llama-8b": ("llama", 128_256, False, _dense(32, 4096, 32, 8, 128, 14_336)),
    "llama-70b": ("llama", 128_256, False, _dense(80, 8192, 64, 8, 128, 28_672)),
    "qwen3-0.6b": ("qwen3", 151_936, True, _dense(28, 1024, 16, 8, 128, 3072)),
    "qwen3-8b": ("qwen3", 151_936, False, _dense(36, 4096, 32, 8, 128, 12_288)),
    "qwen3-32b": ("qwen3", 151_936, False, _dense(64, 5120, 64, 8, 128, 25_600)),
    "qwen3-30b-a3b": (
        "qwen3moe", 151_936, False, _mixture(128, 8, 768, **_dense(48, 2048, 32, 4, 128, 6144)),
    ),
    "qwen3-235b-a22b": (
        "qwen3moe", 151_936, False, _mixture(128, 8, 1536, **_dense(94, 4096, 64, 4, 128, 12_288)),
    ),
    "minilm": (
        "bert", 30_522, True,
        _dense(6, 384, 12, 12, 32, 1536) | {"context_length": 512, "attention.layer_norm_epsilon": EPS},
    ),
    "gpt-oss-120b": ("gpt-oss", 201_088, False, _mixture(128, 4, 2880, **_GPT_OSS)),
    "qwen3.5-122b-a10b": ("qwen35moe", 248_320, False, _mixture(256, 8, 1024, **_QWEN35)),
    "nomic-embed": (
        "nomic-bert", 30_522, True,
        _dense(12, 768, 12, 12, 64, 3072) | {"context_length": 2048, "attention.layer_norm_epsilon": EPS},
    ),
    "deepseek-671b-a37b": ("deepseek2", 129_280, False, _mixture(256, 8, 2048, **_LATENT)),
}  # fmt: skip


class Values(Mapping[str, Any]):
    """Metadata values with GGUF's types."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def kind(self, key: str) -> tuple[int, bool]:
        value = self._values[key]
        return (_TYPE_OF[type(value[0])], True) if isinstance(value, list) else (_TYPE_OF[type(value)], False)

    def describe(self, key: str) -> str:
        kind = self.kind(key)[0]
        return "a string" if kind == STRING else f"a {SCALARS[kind][0]}"

    def stored(self, key: str) -> bytes:
        kind, value = self.kind(key)[0], self._values[key]
        if kind == STRING:
            return struct.pack("<IQ", kind, len(value.encode())) + value.encode()
        return struct.pack("<I" + SCALARS[kind][1], kind, value)


class Synthetic(GGUF):
    """A synthetic model. `spec` is SHAPE:TYPE, such as "llama-8b:Q4_0". `n_layer` and `n_vocab` limit the
    numbers of layers and tokens. Raises InvalidArgument for an unknown shape or type."""

    mapped = False

    def __init__(self, spec: str, n_layer: int | None = None, n_vocab: int | None = None) -> None:
        name, _, dtype = spec.lower().partition(":")
        if name not in SHAPES or dtype not in MATRIX_TYPES:
            raise InvalidArgument(
                f"synthetic model {spec!r}: expected SHAPE:TYPE with a shape of {', '.join(SHAPES)} "
                f"and a type of {', '.join(MATRIX_TYPES)}"
            )
        arch, n_published, tied, values = SHAPES[name]
        n_vocab = n_vocab or n_published
        values = values | {"block_count": n_layer or values["block_count"]}
        metadata: dict[str, Any] = {"general.architecture": arch, "general.name": f"{name} {dtype.upper()}"}
        metadata |= {f"{arch}.{key}": value for key, value in values.items()}
        metadata |= {f"{arch}.attention.layer_norm_rms_epsilon": EPS, f"{arch}.rope.freq_base": 500_000.0}
        metadata |= {f"{arch}.vocab_size": n_vocab, "tokenizer.ggml.model": "no_vocab"}
        self.metadata = Values(metadata)  # type: ignore[assignment]
        self.paths = [Path(f"synthetic-{name}-{dtype.upper()}")]
        self._parts = [None]  # type: ignore[list-item]
        self._pools: dict[str, npt.NDArray[np.uint8]] = {}
        self.tensors = {}
        self._add("token_embd.weight", (n_vocab, values["embedding_length"]), dtype)
        is_encoder = arch in ENCODERS
        if is_encoder:
            metadata |= {"tokenizer.ggml.token_type_count": 2, f"{arch}.attention.causal": False}
        if arch == "bert":
            self._add("position_embd.weight", (values["context_length"], values["embedding_length"]), "f32")
        for weight in load_model(self).weights():
            stored = weight.part.tensor if weight.part else weight.name
            if stored not in self.tensors and (stored != "output.weight" or not tied):
                self._add(stored, weight.shapes()[0], dtype)
                if is_encoder and stored.endswith("norm.weight"):
                    self._add(stored.removesuffix("weight") + "bias", weight.shapes()[0], dtype)

    def _add(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        if len(shape) == 1 or "ffn_gate_inp" in name:
            dtype = "f32"
        elif shape[-1] % block_of(dtype)[0]:
            dtype = "f16"
        nbytes = int(np.prod(shape[:-1])) * row_nbytes(dtype, shape[-1])
        self.tensors[name] = TensorInfo(name, shape, dtype, nbytes, 0, 0)

    def __enter__(self) -> Self:
        return self

    def close(self) -> None:
        pass

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Return reproducible random bytes of the tensor's type and size. Norms' weights are ones, and their
        biases are zeros."""
        info = self.tensors[name]
        if len(info.shape) == 1:
            return np.full(info.shape, not name.endswith("bias"), np.float32).view(np.uint8)
        if info.type not in self._pools:
            pool = weights(np.random.default_rng(0), info.type, POOL_ELEMENTS // 256, 256, scale=0.05)
            assert pool.raw is not None
            self._pools[info.type] = np.ascontiguousarray(pool.raw).reshape(-1).view(np.uint8)
        pool_bytes, (_, block) = self._pools[info.type], block_of(info.type)
        first = zlib.crc32(name.encode()) % (pool_bytes.size // block) * block
        shifted = np.concatenate([pool_bytes[first:], pool_bytes[:first]])
        return np.tile(shifted, -(-info.nbytes // shifted.size))[: info.nbytes]
