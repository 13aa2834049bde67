"""llama (Llama 1 to 3, Mistral, SmolLM): the decoder that the other model files are described against.

Pre-norm blocks, RoPE on adjacent pairs (with frequency factors where the file has them), grouped-query
attention, SwiGLU. Touvron et al. 2023, arXiv:2302.13971.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.formats import block_of
from vkbackend.meta import ops
from vkbackend.meta.plan import columns, rows
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
from vkbackend.rope import RopeTable


@dataclass(frozen=True, slots=True)
class Config:
    """Hyper-parameters, named after their GGUF keys' field-standard short forms."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int
    eps: float
    scale: float  # of q k^T
    rope: RopeTable

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> Config:
        """Raises GGUFError for missing or impossible values, UnsupportedModel for features that are not
        there."""
        n_embd, n_head = read_count(gguf, "embedding_length"), read_count(gguf, "attention.head_count")
        head_dim = read_count(gguf, "attention.key_length", n_embd // n_head or 1)
        n_head_kv = read_count(gguf, "attention.head_count_kv", n_head)
        if n_head % n_head_kv:
            raise GGUFError(f"{gguf.paths[0]}: {n_head} heads are not a multiple of {n_head_kv} kv heads")
        if head_dim % 8 or head_dim > MAX_HEAD_DIM:
            raise UnsupportedModel(f"head size {head_dim}: multiples of 8 up to {MAX_HEAD_DIM} are supported")
        for key, want in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim)):
            if (found := read_count(gguf, key, head_dim)) != want:
                raise UnsupportedModel(f"llama.{key} = {found}: only the key length {want} is supported")
        check_off(gguf, "expert_count")
        check_off(gguf, "attention.clamp_kqv")
        n_ctx_train = read_count(gguf, "context_length", limit=1 << 31)
        scale = float(gguf.f32("llama.attention.scale", 0.0)) or head_dim**-0.5
        factors = gguf.data("rope_freqs.weight").view("<f4") if "rope_freqs.weight" in gguf.tensors else None
        if "token_embd.weight" not in gguf.tensors:
            raise GGUFError(f"{gguf.paths[0]}: the tensor 'token_embd.weight' is missing")
        return cls(
            n_layer=read_count(gguf, "block_count", limit=MAX_LAYERS),
            n_embd=n_embd,
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim=head_dim,
            n_ff=read_count(gguf, "feed_forward_length"),
            n_vocab=gguf.tensors["token_embd.weight"].shape[0],
            n_ctx_train=n_ctx_train,
            eps=float(gguf.f32("llama.attention.layer_norm_rms_epsilon")),
            scale=scale,
            rope=read_rope(gguf, head_dim, n_ctx_train, factors),
        )


class Model:
    """The weights and the graph."""

    def __init__(self, gguf: GGUF) -> None:
        self.config = c = Config.from_gguf(gguf)
        self.n_layer, self.n_vocab, self.n_embd, self.n_ctx_train = (
            c.n_layer,
            c.n_vocab,
            c.n_embd,
            c.n_ctx_train,
        )

    def weights(self) -> list[WeightSpec]:
        c = self.config
        q, kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        specs = [
            WeightSpec("token_embd.weight", (c.n_vocab, c.n_embd), host=True),
            WeightSpec("output_norm.weight", (c.n_embd,)),
            WeightSpec("output.weight", (c.n_vocab, c.n_embd), rows("vocab"), source="token_embd.weight"),
        ]
        for il in range(c.n_layer):
            specs += [
                WeightSpec(f"blk.{il}.attn_norm.weight", (c.n_embd,)),
                WeightSpec(f"blk.{il}.attn_q.weight", (q, c.n_embd), rows("heads")),
                WeightSpec(f"blk.{il}.attn_k.weight", (kv, c.n_embd), rows("kv_heads")),
                WeightSpec(f"blk.{il}.attn_v.weight", (kv, c.n_embd), rows("kv_heads")),
                WeightSpec(f"blk.{il}.attn_output.weight", (c.n_embd, q), columns("heads")),
                WeightSpec(f"blk.{il}.ffn_norm.weight", (c.n_embd,)),
                WeightSpec(f"blk.{il}.ffn_gate.weight", (c.n_ff, c.n_embd), rows("ffn")),
                WeightSpec(f"blk.{il}.ffn_up.weight", (c.n_ff, c.n_embd), rows("ffn")),
                WeightSpec(f"blk.{il}.ffn_down.weight", (c.n_embd, c.n_ff), columns("ffn")),
            ]
        return specs

    def kv(self, il: int) -> KVSpec:
        return KVSpec(self.config.n_head_kv, self.config.head_dim, self.config.head_dim)

    def ropes(self) -> dict[str, RopeTable]:
        return {"rope": self.config.rope}

    def layer(self, il: int, types: Mapping[str, str]) -> Layer:
        c = self.config
        o_block, _ = block_of(types[f"blk.{il}.attn_output.weight"])
        down_block, _ = block_of(types[f"blk.{il}.ffn_down.weight"])
        attention = Attention(c.n_head, c.n_head_kv, c.head_dim, c.head_dim, o_block)
        return Layer(attention, FeedForward(c.n_ff, down_block))

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
        return h + self.feed_forward(ops.rms_norm(h, w("ffn_norm"), self.config.eps), w)

    def attention(self, x: Tensor, w: Weights, cache: LayerCache) -> Tensor:
        c = self.config
        q = ops.rope(ops.linear(x, w("attn_q")), c.head_dim)
        k = ops.rope(ops.linear(x, w("attn_k")), c.head_dim)
        ops.kv_store(k, cache.k, cache.cells)
        ops.kv_store(ops.linear(x, w("attn_v")), cache.v, cache.cells)
        a = ops.attention(
            q,
            cache.k,
            cache.v,
            cache.cells,
            heads=c.n_head,
            kv_heads=c.n_head_kv,
            head_dim_k=c.head_dim,
            head_dim_v=c.head_dim,
            scale=c.scale,
        )
        return ops.linear(a, w("attn_output"))

    def feed_forward(self, x: Tensor, w: Weights) -> Tensor:
        return ops.linear(
            ops.silu_mul(ops.linear(x, w("ffn_gate")), ops.linear(x, w("ffn_up"))), w("ffn_down")
        )
