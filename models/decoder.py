"""The pre-norm decoder that the model files describe themselves against: hyper-parameters, weights with
roles, the graph of a step.

A model file states what its architecture does otherwise, mostly in `rotate`. Biases are added wherever the
file has them. Roles, formulas and keys: the papers named in the model files, and llama.cpp's GGUF names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.formats import block_of
from vkbackend.meta import ops
from vkbackend.meta.plan import MIRROR, Role, columns, rows
from vkbackend.meta.policy import Attention, FeedForward, Layer
from vkbackend.meta.tensor import Graph, Tensor
from vkbackend.models.base import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    KVSpec,
    LayerCache,
    Weights,
    WeightSpec,
    check_off,
    read_count,
    read_rope,
)
from vkbackend.models.gguf import GGUF
from vkbackend.ops_moe import MAX_EXPERTS, MAX_USED
from vkbackend.rope import RopeTable

SOFTMAX = 1  # of expert_gating_func


@dataclass(frozen=True, slots=True)
class Config:
    """Hyper-parameters, named after their GGUF keys' field-standard short forms."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int  # of each expert, where there are experts
    n_vocab: int
    n_ctx_train: int
    eps: float
    scale: float  # of q k^T
    rope: RopeTable
    n_expert: int = 0  # 0: a dense FFN
    n_used: int = 0
    expert_scale: float = 1.0

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> Config:
        """Raises GGUFError for missing or impossible values, UnsupportedModel for features that are not
        there."""
        arch = gguf.architecture
        n_embd, n_head = read_count(gguf, "embedding_length"), read_count(gguf, "attention.head_count")
        head_dim = read_count(gguf, "attention.key_length", n_embd // n_head or 1)
        n_head_kv = read_count(gguf, "attention.head_count_kv", n_head)
        if n_head % n_head_kv:
            raise GGUFError(f"{gguf.paths[0]}: {n_head} heads are not a multiple of {n_head_kv} kv heads")
        if head_dim % 8 or head_dim > MAX_HEAD_DIM:
            raise UnsupportedModel(f"head size {head_dim}: multiples of 8 up to {MAX_HEAD_DIM} are supported")
        for key in ("attention.value_length", "rope.dimension_count"):
            if (found := read_count(gguf, key, head_dim)) != head_dim:
                raise UnsupportedModel(f"{arch}.{key} = {found}: only the key length {head_dim} is supported")
        check_off(gguf, "attention.clamp_kqv")
        n_ctx_train = read_count(gguf, "context_length", limit=1 << 31)
        if (window := gguf.u32(f"{arch}.attention.sliding_window", 0)) and window < n_ctx_train:
            raise UnsupportedModel(
                f"{arch}.attention.sliding_window = {window} is not supported; only windows of at least the "
                f"context length {n_ctx_train} are"
            )
        factors = gguf.data("rope_freqs.weight").view("<f4") if "rope_freqs.weight" in gguf.tensors else None
        if "token_embd.weight" not in gguf.tensors:
            raise GGUFError(f"{gguf.paths[0]}: the tensor 'token_embd.weight' is missing")
        n_expert, n_used = _experts(gguf)
        return cls(
            n_layer=read_count(gguf, "block_count", limit=MAX_LAYERS),
            n_embd=n_embd,
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim=head_dim,
            n_ff=_n_ff(gguf, n_expert),
            n_vocab=gguf.tensors["token_embd.weight"].shape[0],
            n_ctx_train=n_ctx_train,
            eps=float(gguf.f32(f"{arch}.attention.layer_norm_rms_epsilon")),
            scale=float(gguf.f32(f"{arch}.attention.scale", 0.0)) or head_dim**-0.5,
            rope=read_rope(gguf, head_dim, n_ctx_train, factors),
            n_expert=n_expert,
            n_used=n_used,
            expert_scale=float(gguf.f32(f"{arch}.expert_weights_scale", 0.0)) or 1.0,
        )


def _experts(gguf: GGUF) -> tuple[int, int]:
    """(experts, experts used per token), zeros for a dense model; other kinds of routing are refused."""
    arch = gguf.architecture
    n_expert = int(gguf.u32(f"{arch}.expert_count", 0))
    if not n_expert:
        check_off(gguf, "expert_used_count")
        return 0, 0
    n_used = read_count(gguf, "expert_used_count")
    if n_used > n_expert:
        raise GGUFError(f"{gguf.paths[0]}: {n_used} of {n_expert} experts are used")
    if n_expert > MAX_EXPERTS or n_used > MAX_USED:
        raise UnsupportedModel(
            f"{n_used} of {n_expert} experts per token: up to {MAX_USED} of {MAX_EXPERTS} are supported"
        )
    for key, off in (
        ("expert_gating_func", SOFTMAX),
        ("expert_weights_norm", True),
        ("expert_group_count", 1),
        ("expert_shared_count", 0),
        ("expert_shared_feed_forward_length", 0),
        ("leading_dense_block_count", 0),
    ):
        check_off(gguf, key, off)
    return n_expert, n_used


def _n_ff(gguf: GGUF, n_expert: int) -> int:
    has_own = n_expert and f"{gguf.architecture}.expert_feed_forward_length" in gguf.metadata
    return read_count(gguf, "expert_feed_forward_length" if has_own else "feed_forward_length")


class Decoder:
    """The weights and the graph. A subclass may have experts (`mixture`) and RoPE frequency factors."""

    mixture = False
    freq_factors = False

    def __init__(self, gguf: GGUF) -> None:
        if not self.mixture:
            check_off(gguf, "expert_count")
        if not self.freq_factors and "rope_freqs.weight" in gguf.tensors:
            raise UnsupportedModel(f"{gguf.paths[0]}: {gguf.architecture} reads no rope_freqs.weight")
        self.config = c = Config.from_gguf(gguf)
        self.n_layer, self.n_vocab = c.n_layer, c.n_vocab
        self.n_embd, self.n_ctx_train, self.n_used = c.n_embd, c.n_ctx_train, c.n_used
        self._biases = {name for name in gguf.tensors if name.endswith(".bias")}
        routers = [gguf.tensors.get(f"blk.{il}.ffn_gate_inp.weight") for il in range(c.n_layer)]
        for router in routers if c.n_expert else ():
            if router and router.type != "f32":
                raise UnsupportedModel(f"{gguf.paths[0]}: {router.name} is {router.type}, supported is f32")

    # ---- weights ----

    def weights(self) -> list[WeightSpec]:
        c = self.config
        specs = [
            WeightSpec("token_embd.weight", (c.n_vocab, c.n_embd), host=True),
            WeightSpec("output_norm.weight", (c.n_embd,)),
            WeightSpec("output.weight", (c.n_vocab, c.n_embd), rows("vocab"), source="token_embd.weight"),
        ]
        for il in range(c.n_layer):
            for spec in [*self.attention_weights(), *self.feed_forward_weights()]:
                spec = replace(spec, name=f"blk.{il}.{spec.name}.weight")
                specs.append(spec)
                bias = f"{spec.name.removesuffix('.weight')}.bias"
                if len(spec.shape) == 2 and spec.role.dim and bias in self._biases:
                    specs.append(WeightSpec(bias, spec.shape[:1], MIRROR if spec.role.axis else spec.role))
        return specs

    def attention_weights(self) -> list[WeightSpec]:
        """Of one layer, names without `blk.N.` and `.weight`."""
        c = self.config
        q, kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        return [
            WeightSpec("attn_norm", (c.n_embd,)),
            WeightSpec("attn_q", (q, c.n_embd), rows("heads")),
            WeightSpec("attn_k", (kv, c.n_embd), rows("kv_heads")),
            WeightSpec("attn_v", (kv, c.n_embd), rows("kv_heads")),
            WeightSpec("attn_output", (c.n_embd, q), columns("heads")),
        ]

    def feed_forward_weights(self) -> list[WeightSpec]:
        c = self.config
        norm = WeightSpec("ffn_norm", (c.n_embd,))
        if not c.n_expert:
            return [
                norm,
                WeightSpec("ffn_gate", (c.n_ff, c.n_embd), rows("ffn")),
                WeightSpec("ffn_up", (c.n_ff, c.n_embd), rows("ffn")),
                WeightSpec("ffn_down", (c.n_embd, c.n_ff), columns("ffn")),
            ]
        return [
            norm,
            WeightSpec("ffn_gate_inp", (c.n_expert, c.n_embd)),
            WeightSpec("ffn_gate_exps", (c.n_expert, c.n_ff, c.n_embd), Role("experts", 1)),
            WeightSpec("ffn_up_exps", (c.n_expert, c.n_ff, c.n_embd), Role("experts", 1)),
            WeightSpec("ffn_down_exps", (c.n_expert, c.n_embd, c.n_ff), Role("experts", 2)),
        ]

    def kv(self, il: int) -> KVSpec:
        return KVSpec(self.config.n_head_kv, self.config.head_dim, self.config.head_dim)

    def ropes(self) -> dict[str, RopeTable]:
        return {"rope": self.config.rope}

    def layer(self, il: int, types: Mapping[str, str]) -> Layer:
        c = self.config
        down = "ffn_down_exps" if c.n_expert else "ffn_down"
        o_block, down_block = (
            block_of(types[f"blk.{il}.{name}.weight"])[0] for name in ("attn_output", down)
        )
        attention = Attention(c.n_head, c.n_head_kv, c.head_dim, c.head_dim, o_block)
        return Layer(attention, FeedForward(c.n_ff, down_block, c.n_expert))

    # ---- graph ----

    def forward(self, graph: Graph, w: Weights, caches: list[LayerCache]) -> None:
        h = ops.embed(graph, w("token_embd"))
        for il, cache in enumerate(caches):
            with graph.scope(f"blk.{il}"):
                h = self.block(h, w.layer(il), cache)
        if graph.n_outputs:
            x = ops.rms_norm(ops.outputs(h), w("output_norm"), self.config.eps)
            ops.logits(x, w("output"))

    def block(self, h: Tensor, w: Weights, cache: LayerCache) -> Tensor:
        h = h + self.attention(ops.rms_norm(h, w("attn_norm"), self.config.eps), w, cache)
        x = ops.rms_norm(h, w("ffn_norm"), self.config.eps)
        return h + (self.experts(x, h, w) if self.config.n_expert else self.feed_forward(x, w))

    def attention(self, x: Tensor, w: Weights, cache: LayerCache) -> Tensor:
        c = self.config
        q, k, v = (linear(x, w, name) for name in ("attn_q", "attn_k", "attn_v"))
        ops.kv_store(self.rotate(k, w, "attn_k"), cache.k, cache.cells)
        ops.kv_store(v, cache.v, cache.cells)
        a = ops.attention(
            self.rotate(q, w, "attn_q"),
            cache.k,
            cache.v,
            cache.cells,
            heads=c.n_head,
            kv_heads=c.n_head_kv,
            head_dim_k=c.head_dim,
            head_dim_v=c.head_dim,
            scale=c.scale,
        )
        return linear(a, w, "attn_output")

    def rotate(self, x: Tensor, w: Weights, name: str) -> Tensor:
        """q or k (`name` is its projection's) on the way to attention: RoPE on pairs half a head apart."""
        return ops.rope(x, self.config.head_dim, half_split=True)

    def feed_forward(self, x: Tensor, w: Weights) -> Tensor:
        gate, up = linear(x, w, "ffn_gate"), linear(x, w, "ffn_up")
        return linear(ops.silu_mul(gate, up), w, "ffn_down")

    def experts(self, x: Tensor, h: Tensor, w: Weights) -> Tensor:
        c = self.config
        names = ("ffn_norm", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
        return ops.moe(x, h, *map(w, names), n_used=c.n_used, eps=c.eps, scale=c.expert_scale)


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    return ops.linear(x, w(name), w.bias(name))
