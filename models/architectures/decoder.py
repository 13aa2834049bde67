"""The pre-norm decoder that the model files describe themselves against: hyper-parameters, weights with
roles, the graph of a step.

A model file states what its architecture does otherwise: attributes, hyper-parameters by layer, weights,
hooks of the graph. Biases are added wherever the file has them. Roles, formulas and keys: the papers named in
the model files, and llama.cpp's GGUF names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.formats import block_of
from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.plan import MIRROR, columns, rows
from vkbackend.meta.policy import Attention, FeedForward, Layer
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import (
    MAX_HEAD_DIM,
    ROPE_FACTORS,
    KVSpec,
    LayerCache,
    LayerMemory,
    MemorySpec,
    Weights,
    WeightSpec,
    check_off,
    fused,
    linear,
    read_count,
    read_counts,
    read_factors,
    read_float,
    read_n_layer,
    read_rope,
)
from vkbackend.models.architectures.mixture import Mixture, read_mixtures
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Hyper-parameters of one layer."""

    n_head: int
    n_head_kv: int
    head_dim: int  # of q and k
    head_dim_v: int
    n_ff: int  # of a dense FFN
    scale: float  # of q k^T
    n_rot: int  # dimensions of a head that RoPE turns, the first ones
    rope: str = "rope"  # the name of its RoPE table
    window: int = 0  # positions that attention sees, the row's own included; 0: all
    mixture: Mixture | None = None  # in place of the dense FFN
    chunk: int = 0  # a position sees those from the last multiple of it on; 0: from 0 on


@dataclass(frozen=True, slots=True)
class Config:
    """Hyper-parameters, named after their GGUF keys' field-standard short forms."""

    n_embd: int
    n_vocab: int
    n_ctx_train: int
    eps: float
    layers: tuple[LayerConfig, ...]
    softcap: float = 0.0  # c of c tanh(logits / c), 0: none
    attn_softcap: float = 0.0  # the same of q k^T

    @classmethod
    def from_gguf(
        cls,
        gguf: GGUF,
        mixture: Mixture | None = None,
        low: int = 1,
        norm_key: str = "layer_norm_rms_epsilon",
        layers: tuple[LayerConfig, ...] | None = None,
    ) -> Config:
        """`layers`: in place of what their keys say. Raises GGUFError for missing or impossible values,
        UnsupportedModel for features that are not there."""
        arch = gguf.architecture
        check_off(gguf, "attention.clamp_kqv")
        n_ctx_train = read_count(gguf, "context_length", limit=1 << 31)
        if "token_embd.weight" not in gguf.tensors:
            raise GGUFError(f"{gguf.paths[0]}: the tensor 'token_embd.weight' is missing")
        return cls(
            n_embd=read_count(gguf, "embedding_length"),
            n_vocab=gguf.tensors["token_embd.weight"].shape[0],
            n_ctx_train=n_ctx_train,
            eps=float(gguf.f32(f"{arch}.attention.{norm_key}")),
            layers=layers or read_layers(gguf, mixture, low),
        )


def with_windows(config: Config, window: int, local: Sequence[bool]) -> Config:
    """The same where the layers that are `local` see `window` positions, and the others all."""
    layers = [
        replace(layer, window=window if is_local else 0)
        for layer, is_local in zip(config.layers, local, strict=True)
    ]
    return replace(config, layers=tuple(layers))


def read_layers(gguf: GGUF, mixture: Mixture | None = None, low: int = 1) -> tuple[LayerConfig, ...]:
    """The layers as their keys say, one value for all or one each; a model file replaces what depends on the
    kind of layer. `mixture` says what the architecture's experts are like, if it may have some, `low` how few
    kv heads and columns of a dense FFN there may be."""
    n_layer = read_n_layer(gguf)
    mixtures = read_mixtures(gguf, n_layer, mixture) if mixture else [None] * n_layer
    n_ff = (0,) * n_layer if all(mixtures) else read_counts(gguf, "feed_forward_length", n_layer, low=low)
    heads = read_counts(gguf, "attention.head_count", n_layer)
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
            raise GGUFError(f"{gguf.paths[0]}: RoPE cannot turn {n_rot} dimensions of heads of {head_dim}")
        scale = read_float(gguf, "attention.scale", head_dim**-0.5)
        layers.append(
            LayerConfig(n_head, n_head_kv, head_dim, head_dim_v, width, scale, n_rot, mixture=experts)
        )
    return tuple(layers)


class Decoder:
    """The weights and the graph. A subclass may have experts (`mixture`) and RoPE frequency factors; norms of
    q and k are applied where its weights have them."""

    mixture: Mixture | None = None  # what is fixed of its experts, where an architecture may have some
    freq_factors = False
    windows = False  # whether attention.sliding_window means something
    interleaved_sections = False  # of RoPE, where the file has sections
    half_split = True  # RoPE pairs element i of a head with i + n_rot / 2; False: pairs are adjacent
    pre_ffn_norm = "ffn_norm"  # the tensor's name
    pre_norms = True  # norms of what attention and a dense FFN read
    post_norms = False  # norms of what attention and FFN give, before it is added

    def __init__(self, gguf: GGUF) -> None:
        if not self.mixture:
            check_off(gguf, "expert_count")
            check_off(gguf, "expert_used_count")
        if not self.freq_factors:
            for name in set(ROPE_FACTORS) & set(gguf.tensors):
                raise UnsupportedModel(f"{gguf.paths[0]}: {gguf.architecture} reads no {name}")
        self.config = c = self.read_config(gguf)
        if not self.windows:
            self._check_no_window(gguf)
        self.rope_tables = self.read_ropes(gguf)
        self.n_layer, self.n_vocab = len(c.layers), c.n_vocab
        self.n_embd, self.n_ctx_train = c.n_embd, c.n_ctx_train
        self.n_used = max(layer.mixture.n_used if layer.mixture else 0 for layer in c.layers)
        self.control: Mapping[int, np.ndarray] = {}
        self.in_file: frozenset[str] = frozenset()
        self._shapes = {name: info.shape for name, info in gguf.tensors.items()}

    # ---- hyper-parameters ----

    def read_config(self, gguf: GGUF) -> Config:
        return Config.from_gguf(gguf, self.mixture)

    def _check_no_window(self, gguf: GGUF) -> None:
        name = f"{gguf.architecture}.attention.sliding_window"
        if (window := gguf.u32(name, 0)) and window < self.config.n_ctx_train:
            raise UnsupportedModel(
                f"{name} = {window} is not supported; only windows of at least the context length "
                f"{self.config.n_ctx_train} are"
            )

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        """The tables that the layers name; "rope_long" is "rope" in contexts beyond the original one."""
        [n_rot] = {layer.n_rot for layer in self.config.layers}
        freqs, long, short = (read_factors(gguf, name) for name in ROPE_FACTORS)
        n_ctx = self.config.n_ctx_train
        factors = freqs if short is None else short
        tables = {"rope": read_rope(gguf, n_rot, n_ctx, factors, self.interleaved_sections)}
        return tables if long is None else tables | {"rope_long": read_rope(gguf, n_rot, n_ctx, long)}

    # ---- weights ----

    def unread(self) -> set[str]:
        """Tensors that its files may have and nothing needs."""
        return set()

    def weights(self) -> list[WeightSpec]:
        c = self.config
        specs = [
            WeightSpec("token_embd.weight", (c.n_vocab, c.n_embd), host=True),
            WeightSpec("output_norm.weight", (c.n_embd,)),
            WeightSpec("output.weight", (c.n_vocab, c.n_embd), rows("vocab"), source="token_embd.weight"),
        ]
        for il in range(self.n_layer):
            if (values := self.control.get(il)) is not None:
                specs.append(WeightSpec(f"blk.{il}.control_vector.weight", (c.n_embd,), values=values))
            layer = [*self.attention_weights(il), *self.feed_forward_weights(il)]
            layer = [replace(spec, name=_full(f"blk.{il}.", spec.name)) for spec in layer]
            for spec in self._as_stored(layer, f"blk.{il}."):
                specs.append(spec)
                stored = spec.part.tensor if spec.part else spec.name
                if len(spec.shape) == 2 and spec.role.dim and _bias(stored) in self._shapes:
                    role = MIRROR if spec.role.axis else spec.role
                    part = spec.part and replace(spec.part, tensor=_bias(stored))
                    specs.append(WeightSpec(_bias(spec.name), spec.shape[:1], role, part=part))
        return specs

    def _as_stored(self, specs: list[WeightSpec], prefix: str) -> list[WeightSpec]:
        """The specs of a layer, with q, k, v or gate, up as parts of one tensor where the file has that: up
        then has the rows of both, as each expert has them in ffn_gate_up_exps."""
        by_name = {spec.name: spec for spec in specs}
        for names, tensor in (
            (("attn_q.weight", "attn_k.weight", "attn_v.weight"), "attn_qkv.weight"),
            (("ffn_gate.weight", "ffn_up.weight"), "ffn_up.weight"),
            (("ffn_gate_exps.weight", "ffn_up_exps.weight"), "ffn_gate_up_exps.weight"),
            (("ffn_gate_exps.bias", "ffn_up_exps.bias"), "ffn_gate_up_exps.bias"),
        ):
            group = [by_name[prefix + name] for name in names if prefix + name in by_name]
            if len(group) == len(names) and group[0].name not in self._shapes:
                *repeat, _, n_in = group[0].shape  # the experts, if any
                n_rows = sum(spec.shape[-2] for spec in group)
                if self._shapes.get(prefix + tensor) in ((*repeat, n_rows, n_in), (*repeat, n_rows)):
                    by_name |= {spec.name: spec for spec in fused(prefix + tensor, group, *repeat)}
        return list(by_name.values())

    def attention_weights(self, il: int) -> list[WeightSpec]:
        """Of one layer, names without `blk.N.` and `.weight`."""
        n_embd, layer = self.config.n_embd, self.config.layers[il]
        q, k = layer.n_head * layer.head_dim, layer.n_head_kv * layer.head_dim
        o, v = layer.n_head * layer.head_dim_v, layer.n_head_kv * layer.head_dim_v
        specs = [
            *([WeightSpec("attn_norm", (n_embd,))] if self.pre_norms else []),
            WeightSpec("attn_q", (q, n_embd), rows("heads")),
            WeightSpec("attn_k", (k, n_embd), rows("kv_heads")),
            WeightSpec("attn_v", (v, n_embd), rows("kv_heads")),
            WeightSpec("attn_output", (n_embd, o), columns("heads")),
        ]
        return [*specs, WeightSpec("post_attention_norm", (n_embd,))] if self.post_norms else specs

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        n_embd, layer = self.config.n_embd, self.config.layers[il]
        norms = [WeightSpec(self.pre_ffn_norm, (n_embd,))] if self.pre_norms else []
        if self.post_norms:
            norms.append(WeightSpec("post_ffw_norm", (n_embd,)))
        if layer.mixture:
            prefix = f"blk.{il}."
            stored = {name.removeprefix(prefix) for name in self._shapes if name.startswith(prefix)}
            return [*norms, *layer.mixture.weights(n_embd, stored)]
        return [*norms, *self.dense_weights(il)]

    def dense_weights(self, il: int) -> list[WeightSpec]:
        n_embd, layer = self.config.n_embd, self.config.layers[il]
        return [
            WeightSpec("ffn_gate", (layer.n_ff, n_embd), rows("ffn")),
            WeightSpec("ffn_up", (layer.n_ff, n_embd), rows("ffn")),
            WeightSpec("ffn_down", (n_embd, layer.n_ff), columns("ffn")),
        ]

    def head_norm_weights(self, il: int) -> list[WeightSpec]:
        """RMS norms of the heads of q and k, for the architectures that have them."""
        names = "attn_q_norm", "attn_k_norm"
        return [WeightSpec(name, (self.config.layers[il].head_dim,)) for name in names]

    def kv(self, il: int) -> MemorySpec:
        layer = self.config.layers[il]
        return KVSpec(layer.n_head_kv, layer.head_dim, layer.head_dim_v, window=layer.window or layer.chunk)

    def ropes(self, n_ctx: int) -> dict[str, RopeTable]:
        tables = dict(self.rope_tables)
        long = tables.pop("rope_long", None)
        return tables | {"rope": long} if long and n_ctx > long.orig_ctx else tables

    def layer(self, il: int, types: Mapping[str, str]) -> Layer:
        return Layer(self.attention_of(il, types), self.feed_forward_of(il, types))

    def attention_of(self, il: int, types: Mapping[str, str]) -> Attention:
        """The heads that a layer has to share out."""
        layer, block = self.config.layers[il], block_of(types[f"blk.{il}.attn_output.weight"])[0]
        return Attention(layer.n_head, layer.n_head_kv, layer.head_dim, layer.head_dim_v, block)

    def feed_forward_of(self, il: int, types: Mapping[str, str]) -> FeedForward:
        """And the columns of its feed-forward network."""
        layer, prefix = self.config.layers[il], f"blk.{il}."
        if layer.mixture:
            return layer.mixture.feed_forward(types, prefix)
        return FeedForward(layer.n_ff, block_of(types[f"{prefix}ffn_down.weight"])[0])

    # ---- graph ----

    def forward(self, graph: Graph, w: Weights, caches: list[LayerMemory]) -> None:
        h = self.embed(graph, w)
        for il, cache in enumerate(caches):
            with graph.scope(f"blk.{il}"):
                h = self.steered(self.block(h, w.layer(il), cache, il), w.layer(il), il)
        self.head(h, graph, w)

    def steered(self, h: Tensor, w: Weights, il: int) -> Tensor:
        """The residual behind a layer with its control vector, if it has one."""
        return ops.add_vector(h, w("control_vector")) if il in self.control else h

    def head(self, h: Tensor, graph: Graph, w: Weights) -> None:
        if graph.n_outputs:
            ops.logits(self.normed_outputs(h, w), w("output"), softcap=self.config.softcap)

    def normed_outputs(self, h: Tensor, w: Weights) -> Tensor:
        return ops.rms_norm(ops.outputs(h), w("output_norm"), self.config.eps)

    def embed(self, graph: Graph, w: Weights) -> Tensor:
        return ops.embed(graph, w("token_embd"))

    def block(self, h: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        eps = self.config.eps
        x = ops.rms_norm(h, w("attn_norm"), eps) if self.pre_norms else h
        a = self.mix(x, w, cache, il)
        h = h + (ops.rms_norm(a, w("post_attention_norm"), eps) if self.post_norms else a)
        f = self.ffn(h, w, il)
        return h + (ops.rms_norm(f, w("post_ffw_norm"), eps) if self.post_norms else f)

    def mix(self, x: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        """What brings positions together: attention, where a model has nothing else."""
        assert isinstance(cache, LayerCache), f"layer {il} has no attention"
        return self.attention(x, w, cache, il)

    def ffn(self, h: Tensor, w: Weights, il: int) -> Tensor:
        """What is added to the residual h: the dense FFN's or the experts' of its norm."""
        eps, mixture = self.config.eps, self.config.layers[il].mixture
        x = ops.rms_norm(h, w(self.pre_ffn_norm), eps) if self.pre_norms else h
        return mixture.forward(x, h, w(self.pre_ffn_norm), w, eps) if mixture else self.feed_forward(x, w, il)

    def attention(self, x: Tensor, w: Weights, cache: LayerCache, il: int) -> Tensor:
        q = self.rotate(linear(x, w, "attn_q"), w, "attn_q", il)
        if not cache.shared:
            self.store(x, w, cache, il)
        return self.attend(q, x, w, cache, il)

    def attend(self, q: Tensor, x: Tensor, w: Weights, cache: LayerCache, il: int) -> Tensor:
        """What q, turned, finds in the caches, through the gate and the output projection."""
        layer = self.config.layers[il]
        a = ops.attention(
            q,
            cache.k,
            cache.v,
            cache.cells,
            heads=layer.n_head,
            kv_heads=layer.n_head_kv,
            head_dim_k=layer.head_dim,
            head_dim_v=layer.head_dim_v,
            scale=layer.scale,
            window=cache.window,
            chunk=layer.chunk,
            softcap=self.config.attn_softcap,
            sinks=w.get("attn_sinks.weight"),
        )
        return linear(self.gate(a, x, w), w, "attn_output")

    def gate(self, a: Tensor, x: Tensor, w: Weights) -> Tensor:
        """What attention gave for x, on the way to its output projection."""
        return a

    def store(self, x: Tensor, w: Weights, cache: LayerCache, il: int) -> None:
        k, v = linear(x, w, "attn_k"), linear(x, w, "attn_v")
        ops.kv_store(self.rotate(k, w, "attn_k", il), cache.k, cache.cells)
        ops.kv_store(v, cache.v, cache.cells)

    def rotate(self, x: Tensor, w: Weights, name: str, il: int) -> Tensor:
        """q or k (`name` is its projection's) on the way to attention: its norm, if it has one, then RoPE."""
        layer = self.config.layers[il]
        if w.has(f"{name}_norm"):
            x = ops.head_norm(x, w(f"{name}_norm"), layer.head_dim, self.config.eps)
        if not self.has_rope(il):
            return x
        return ops.rope(x, layer.head_dim, layer.rope, half_split=self.half_split)

    def has_rope(self, il: int) -> bool:
        """Whether q and k of a layer are turned."""
        return True

    def feed_forward(self, x: Tensor, w: Weights, il: int) -> Tensor:
        gate, up = linear(x, w, "ffn_gate"), linear(x, w, "ffn_up")
        return linear(self.activate(gate, up), w, "ffn_down")

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return ops.silu_mul(gate, up)


def _full(prefix: str, name: str) -> str:
    return f"{prefix}{name}" if "." in name else f"{prefix}{name}.weight"


def _bias(name: str) -> str:
    return f"{name.removesuffix('.weight')}.bias"
