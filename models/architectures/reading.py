"""Reads hyper-parameters from GGUF keys. Errors name an unsupported feature by its key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable

MAX_HEAD_DIM = 576
MAX_LAYERS = 1024


def read_count(gguf: GGUF, key: str, default: Any = None, limit: int = 1 << 24) -> int:
    """Read a positive integer, or an array of equal integers. If the integer is 0, return `default`."""
    name = f"{gguf.architecture}.{key}"
    if name in gguf.metadata and gguf.metadata.kind(name)[1]:
        values = {int(v) for v in gguf.ints(name)}
        if len(values) != 1:
            raise UnsupportedModel(
                f"{name} differs between layers ({sorted(values)[:8]}); one value is supported"
            )
        value = values.pop()
    else:
        value = gguf.u32(name) if default is None else gguf.u32(name, default) or default
    return _counted(gguf, name, int(value), limit)


def read_counts(
    gguf: GGUF,
    key: str,
    n_layer: int,
    default: Sequence[int] | None = None,
    limit: int = 1 << 24,
    low: int = 1,
) -> tuple[int, ...]:
    """Return one integer per layer, at least `low`. The key has one integer or an array."""
    name = f"{gguf.architecture}.{key}"
    if name not in gguf.metadata and default is not None:
        return tuple(default)
    if name not in gguf.metadata or not gguf.metadata.kind(name)[1]:
        return (read_count(gguf, key, limit=limit),) * n_layer
    values = [int(v) for v in gguf.ints(name)]
    if len(values) < n_layer:
        raise GGUFError(f"{gguf.paths[0]}: {name} has {len(values)} values for {n_layer} layers")
    return tuple(_counted(gguf, name, value, limit, low) for value in values[:n_layer])


def read_flags(gguf: GGUF, key: str, n_layer: int) -> tuple[bool, ...]:
    name = f"{gguf.architecture}.{key}"
    flags = [bool(flag) for flag in gguf.flags(name, [])]
    if flags and len(flags) < n_layer:
        raise GGUFError(f"{gguf.paths[0]}: {name} has {len(flags)} values for {n_layer} layers")
    return tuple(flags[:n_layer])


def read_n_layer(gguf: GGUF) -> int:
    """Return the number of layers. Multi-token prediction heads, the layers at the end, count only if the
    model includes them."""
    n_layer = read_count(gguf, "block_count", limit=MAX_LAYERS)
    n_ahead = int(gguf.u32(f"{gguf.architecture}.nextn_predict_layers", 0))
    if n_ahead >= n_layer:
        raise GGUFError(
            f"{gguf.paths[0]}: nextn_predict_layers is {n_ahead}, expected less than {n_layer} (block_count)"
        )
    return n_layer if gguf.with_heads or lacks_heads(gguf) else n_layer - n_ahead


def lacks_heads(gguf: GGUF) -> bool:
    """Return whether the file states multi-token prediction heads, but has no tensors of heads, and its last
    layer is one of the model's own. Some converters leave the heads out and keep the key."""
    arch = gguf.architecture
    last = f"blk.{int(gguf.u32(f'{arch}.block_count', 0)) - 1}."
    stated = gguf.u32(f"{arch}.nextn_predict_layers", 0) and not any(
        ".nextn." in name for name in gguf.tensors
    )
    return bool(stated) and any(name.startswith(last) for name in gguf.tensors)


def read_n_ahead(gguf: GGUF) -> int:
    """Return how many multi-token prediction heads the model includes."""
    return int(gguf.u32(f"{gguf.architecture}.nextn_predict_layers", 0)) if gguf.with_heads else 0


def read_windowed(gguf: GGUF, n_layer: int, period: int) -> tuple[bool, ...]:
    """Return whether each layer has a window. Without flags in the file, every `period`-th layer has no
    window, and with a period of 0 every layer has one. The file may state the period."""
    key = "attention.sliding_window_pattern"
    name = f"{gguf.architecture}.{key}"
    if name in gguf.metadata and gguf.metadata.kind(name)[1]:
        if flags := read_flags(gguf, key, n_layer):
            return flags
    else:
        period = int(gguf.u32(name, period))
    period = period or n_layer + 1
    return tuple(il % period < period - 1 for il in range(n_layer))


def _counted(gguf: GGUF, name: str, value: int, limit: int, low: int = 1) -> int:
    if not low <= value <= limit:
        raise GGUFError(f"{gguf.paths[0]}: {name} is {value}, expected {low}..{limit}")
    return value


def check_off(gguf: GGUF, key: str, off: float = 0) -> None:
    name = f"{gguf.architecture}.{key}"
    if name not in gguf.metadata:
        return
    value = gguf.metadata[name]
    allowed = np.array_equal(value, off)
    # If `off` is not True, then 0, false and empty values also mean off.
    if off is not True:
        allowed = allowed or is_off(value)
    if not allowed:
        raise UnsupportedModel(f"{name} = {value} is not supported; only {off} (off) is")


def is_off(value: Any) -> bool:
    """Return whether a value is 0, false, minus infinity, empty, or an array of such values."""
    if isinstance(value, str | bytes):
        return not value
    return all(v == 0 or v == -math.inf for v in np.atleast_1d(np.asarray(value, object)).tolist())


def read_float(gguf: GGUF, key: str, default: float, low: float = -math.inf) -> float:
    """Read a number that is at least `low`. Return `default` if the key is absent or off."""
    name = f"{gguf.architecture}.{key}"
    if name in gguf.stated:
        return float(gguf.stated[name])
    if name not in gguf.metadata or is_off(gguf.metadata[name]):
        return default
    value = float(gguf.f32(name))
    if value < low:
        raise GGUFError(f"{gguf.paths[0]}: {name} is {value}, expected at least {low}")
    return value


def read_floats(gguf: GGUF, key: str, n_layer: int, low: float = -math.inf) -> tuple[float, ...]:
    """Return one number per layer, at least `low`. The key has one number or an array. Without the key, the
    numbers are 0."""
    name = f"{gguf.architecture}.{key}"
    if name not in gguf.metadata or not gguf.metadata.kind(name)[1]:
        return (read_float(gguf, key, 0.0, low),) * n_layer
    values = tuple(float(v) for v in gguf.floats(name))
    if len(values) < n_layer:
        raise GGUFError(f"{gguf.paths[0]}: {name} has {len(values)} values for {n_layer} layers")
    if bad := [v for v in values if not low <= v < math.inf]:
        raise GGUFError(f"{gguf.paths[0]}: {name} has {bad[0]}, expected finite numbers of at least {low}")
    return values[:n_layer]


SCALED_MATRICES = "attn_q attn_k attn_v attn_qkv attn_output ffn_gate ffn_up ffn_down".split()
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def read_rope(
    gguf: GGUF, n_rot: int, n_ctx_train: int, freq_factors: Any = None, interleaved: bool = False
) -> RopeTable:
    arch = gguf.architecture
    kind = gguf.string(f"{arch}.rope.scaling.type", "none") or "none"
    factor = read_float(gguf, "rope.scaling.factor", read_float(gguf, "rope.scale_linear", 0.0))
    if kind == "none" and is_off(gguf.get(f"{arch}.rope.scaling.type", "")) and factor not in (0.0, 1.0):
        kind = "linear"  # older files state only the factor
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedModel(
            f"{arch}.rope.scaling.type = {kind!r} is not supported; none, linear, yarn and longrope are"
        )
    sections = [int(n) for n in gguf.ints(f"{arch}.rope.dimension_sections", [])]
    if len(sections) not in (0, 3, 4):
        raise GGUFError(f"{gguf.paths[0]}: {arch}.rope.dimension_sections are {sections}, expected 3 or 4")
    return RopeTable(
        n_rot=n_rot,
        freq_base=read_float(gguf, "rope.freq_base", 10_000.0),
        freq_factors=freq_factors,
        # longrope has only frequency factors
        scaling=kind if factor and kind != "longrope" else "none",
        factor=factor or 1.0,
        orig_ctx=read_orig_ctx(gguf, n_ctx_train),
        attn_factor=read_float(gguf, "rope.scaling.attn_factor", 1.0),
        beta_fast=read_float(gguf, "rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=read_float(gguf, "rope.scaling.yarn_beta_slow", 1.0),
        ext_factor=read_float(gguf, "rope.scaling.yarn_ext_factor", 1.0),
        sections=tuple([*sections, 0][:4]) if any(sections) else (),
        interleaved=interleaved,
    )


def read_deepstack(gguf: GGUF, n_layer: int) -> int:
    """Return after how many layers further rows of images are added (DeepStack, Meng et al. 2024,
    arXiv:2406.04334)."""
    name = f"{gguf.architecture}.n_deepstack_layers"
    if (n := int(gguf.u32(name, 0))) > n_layer:
        raise GGUFError(f"{gguf.paths[0]}: {name} is {n}, and the model has {n_layer} layers")
    return n


def read_orig_ctx(gguf: GGUF, n_ctx_train: int) -> int:
    return int(gguf.u32(f"{gguf.architecture}.rope.scaling.original_context_length", 0)) or n_ctx_train


def read_temperature(gguf: GGUF, n_ctx_train: int) -> dict[str, Any]:
    """Read RopeTable's fields for the temperature of q. The default length is the original context length."""
    length = int(gguf.u32(f"{gguf.architecture}.attention.temperature_length", 0))
    return {
        "temperature": read_float(gguf, "attention.temperature_scale", 0.0),
        "temperature_length": length or read_orig_ctx(gguf, n_ctx_train),
    }


def read_scales(gguf: GGUF) -> dict[str, float]:
    """Return the factors of the matrices in SCALED_MATRICES by tensor name. The converter of llama.cpp stores
    one factor per NVFP4 matrix. Factors of experts and of matrices that are not listed are refused, because
    no graph reads them."""
    names = [f"{name}.scale" for name in SCALED_MATRICES]
    return {
        name: float(gguf.data(name).view("<f4")[0])
        for name, info in gguf.tensors.items()
        if name.endswith(tuple(names)) and (info.type, info.shape) == ("f32", (1,))
    }


def read_factors(gguf: GGUF, name: str) -> np.ndarray | None:
    return gguf.data(name).view("<f4") if name in gguf.tensors else None
