"""Reads a decoder's hyper-parameters from the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.models.architectures.mixture import Mixture, read_mixtures
from vkbackend.models.architectures.reading import (
    MAX_HEAD_DIM,
    read_count,
    read_counts,
    read_float,
    read_floats,
    read_n_layer,
)
from vkbackend.models.gguf.reader import GGUF


@dataclass(frozen=True, slots=True)
class LayerConfig:
    n_head: int
    n_head_kv: int
    head_dim: int  # Size of a head of q and k.
    head_dim_v: int
    n_ff: int
    scale: float  # The factor of q k^T.
    n_rot: int  # RoPE rotates this many dimensions of each head.
    rope: str = "rope"
    window: int = 0  # Positions that a row attends to, including its own (0: all).
    mixture: Mixture | None = None  # Replaces the dense FFN.
    chunk: int = 0  # Positions per chunk of chunked attention (0: no chunks).
    first: int = 0  # First position that rows attend to.


@dataclass(frozen=True, slots=True)
class Config:
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    eps: float
    layers: tuple[LayerConfig, ...]
    softcap: float = 0.0  # The c of the soft-cap c tanh(logits / c), or 0.
    attn_softcap: float = 0.0  # The soft-cap of q k^T.
    clamp: float = 0.0  # The largest absolute value of q, k and v, or 0 without a limit.

    @classmethod
    def from_gguf(
        cls,
        gguf: GGUF,
        mixture: Mixture | None = None,
        low: int = 1,
        norm_key: str = "layer_norm_rms_epsilon",
        layers: tuple[LayerConfig, ...] | None = None,
    ) -> Config:
        """Read the file's keys; `layers` replaces the layers that the keys describe. Raises GGUFError,
        UnsupportedModel."""
        arch = gguf.architecture
        n_ctx_train = read_count(gguf, "context_length", limit=1 << 31)
        if "token_embd.weight" not in gguf.tensors:
            raise GGUFError(f"{gguf.paths[0]}: the tensor 'token_embd.weight' is missing")
        return cls(
            n_embd=read_count(gguf, "embedding_length"),
            n_vocab=gguf.tensors["token_embd.weight"].shape[0],
            n_ctx_train=n_ctx_train,
            eps=float(gguf.f32(f"{arch}.attention.{norm_key}")),
            layers=layers or read_layers(gguf, mixture, low),
            clamp=read_float(gguf, "attention.clamp_kqv", 0.0, low=0.0),
        )


def with_windows(config: Config, window: int, local: Sequence[bool], rope: str = "rope") -> Config:
    """Set the sliding window and the RoPE table of the layers whose flag in `local` is true."""
    layers = [
        replace(layer, window=window, rope=rope) if is_local else replace(layer, window=0)
        for layer, is_local in zip(config.layers, local, strict=True)
    ]
    return replace(config, layers=tuple(layers))


def with_limits(config: Config, gguf: GGUF) -> Config:
    """Read the limits of experts' activations, per layer (see Mixture.limit)."""
    kinds = (read_floats(gguf, f"swiglu_clamp_{of}", len(config.layers), low=0.0) for of in ("exp", "shexp"))
    layers = [
        replace(layer, mixture=layer.mixture and replace(layer.mixture, limit=routed, limit_shared=shared))
        for layer, routed, shared in zip(config.layers, *kinds, strict=True)
    ]
    return replace(config, layers=tuple(layers))


def dense_if_stored(config: Config, gguf: GGUF) -> Config:
    """Use a dense FFN instead of experts in each layer for which the file stores one. The file's keys do not
    list these layers."""
    layers = list(config.layers)
    dense = [il for il in range(len(layers)) if f"blk.{il}.ffn_gate.weight" in gguf.tensors]
    widths = read_counts(gguf, "feed_forward_length", len(layers)) if dense else ()
    for il in dense:
        layers[il] = replace(layers[il], n_ff=widths[il], mixture=None)
    return replace(config, layers=tuple(layers))


def read_layers(gguf: GGUF, mixture: Mixture | None = None, low: int = 1) -> tuple[LayerConfig, ...]:
    """Read the layers' hyper-parameters. A key has one value, or one per layer. `mixture` holds the experts'
    defaults. Each layer's kv heads and dense FFN columns must be at least `low`."""
    n_layer = read_n_layer(gguf)
    mixtures = read_mixtures(gguf, n_layer, mixture) if mixture else [None] * n_layer
    n_ff = (0,) * n_layer if all(mixtures) else read_counts(gguf, "feed_forward_length", n_layer, low=low)
    heads = read_counts(gguf, "attention.head_count", n_layer, low=low)
    most = max(max(heads), 1)  # a layer without attention may state no heads
    heads = tuple(n_head or most for n_head in heads)
    kv_heads = read_counts(gguf, "attention.head_count_kv", n_layer, heads, low=low)
    n_embd = read_count(gguf, "embedding_length")
    layers = []
    for n_head, n_head_kv, width, experts in zip(heads, kv_heads, n_ff, mixtures, strict=True):
        if n_head_kv and n_head % n_head_kv:
            raise GGUFError(f"{gguf.paths[0]}: {n_head} heads are not a multiple of {n_head_kv} kv heads")
        head_dim = read_count(gguf, "attention.key_length", n_embd // n_head or 1)
        head_dim_v = read_count(gguf, "attention.value_length", n_embd // n_head or 1)
        for dim in (head_dim, head_dim_v):
            if dim % 8 or dim > MAX_HEAD_DIM:
                raise UnsupportedModel(f"head size {dim}: multiples of 8 up to {MAX_HEAD_DIM} are supported")
        n_rot = read_count(gguf, "rope.dimension_count", head_dim)
        if n_rot > head_dim or n_rot % 2:
            raise GGUFError(
                f"{gguf.paths[0]}: rope.dimension_count is {n_rot}, expected even, up to {head_dim}"
            )
        scale = read_float(gguf, "attention.scale", head_dim**-0.5)
        layers.append(
            LayerConfig(n_head, n_head_kv, head_dim, head_dim_v, width, scale, n_rot, mixture=experts)
        )
    return tuple(layers)
