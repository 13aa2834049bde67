"""Reads a GGUF adapter: pairs NAME.lora_a [rank, n_in] and NAME.lora_b [n_out, rank] for tensors NAME of the
model, as llama.cpp's convert_lora_to_gguf.py writes them."""

from __future__ import annotations

import numpy as np

from vkbackend.errors import AdapterError, UnsupportedModel
from vkbackend.formats import dequantize
from vkbackend.models.adapters.adapter import Adapter, Pair, check_pair
from vkbackend.models.gguf.reader import GGUF

TYPES = ("f32", "f16", "bf16", "q8_0")


def read_gguf_adapter(path: str, architecture: str) -> Adapter:
    """Raises GGUFError for a damaged file, and AdapterError for a malformed adapter or an adapter of another
    architecture. Raises UnsupportedModel for a tensor that is not lora_a or lora_b, or has an unsupported
    type."""
    with GGUF.open(path) as gguf:
        kind = gguf.string("general.type", ""), gguf.string("adapter.type", "")
        if kind != ("adapter", "lora"):
            raise AdapterError(
                f"{path}: general.type is {kind[0]!r} and adapter.type {kind[1]!r}, expected 'adapter' and "
                "'lora'; give the file of a LoRA adapter"
            )
        if (arch := gguf.string("general.architecture", "")) != architecture:
            raise AdapterError(
                f"{path}: the adapter is for {arch!r} models, and the model is {architecture!r}; give an "
                "adapter of this model"
            )
        alpha = float(gguf.f32("adapter.lora.alpha", 0.0))
        invocation = [int(token) for token in gguf.ints("adapter.alora.invocation_tokens", [])]
        names = _names(gguf)
        pairs = {name: _pair(gguf, name, alpha) for name in names}
        task, prefix = (gguf.string(f"adapter.lora.{key}", "") for key in ("task_name", "prompt_prefix"))
        return Adapter(path, pairs, task, prefix, tuple(invocation))


def _names(gguf: GGUF) -> list[str]:
    path, stems = gguf.paths[0], dict[str, set[str]]()
    for tensor in gguf.tensors:
        stem, _, half = tensor.rpartition(".")
        if half not in ("lora_a", "lora_b"):
            raise UnsupportedModel(
                f"{path}: the tensor {tensor!r} is not half of a low-rank pair, and would be ignored; "
                "adapters with only .lora_a and .lora_b tensors are supported"
            )
        stems.setdefault(stem, set()).add(half)
    if not stems:
        raise AdapterError(f"{path}: the file has no tensors NAME.lora_a and NAME.lora_b")
    for stem, halves in stems.items():
        if len(halves) < 2:
            [half] = halves
            raise AdapterError(f"{path}: {stem} has {half} but not its other half; the file is incomplete")
    return list(stems)


def _pair(gguf: GGUF, name: str, alpha: float) -> Pair:
    halves, types = [], set()
    for half in ("lora_a", "lora_b"):
        info = gguf.tensors[f"{name}.{half}"]
        if info.type not in TYPES:
            raise UnsupportedModel(
                f"{gguf.paths[0]}: {info.name} is {info.type}, expected {', '.join(TYPES)}"
            )
        values = dequantize(gguf.data(info.name), info.type, info.shape)
        halves.append(np.array(values, np.float32))  # a copy, because the file is closed
        types.add(info.type)
    dtype = types.pop() if len(types) == 1 else "f32"
    a, b = halves
    # An alpha of 0 means no division by the rank, as in llama.cpp.
    factor = alpha / a.shape[-2] if alpha and a.ndim > 1 and a.shape[-2] else 1.0
    pair = Pair(a, b, "f32" if dtype == "q8_0" else dtype, factor)
    check_pair(str(gguf.paths[0]), name, pair)
    return pair
