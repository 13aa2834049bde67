"""minimax-m3 (MiniMax M3, its text part): layers with an indexer attend to blocks of positions. For each kv
head, the indexer chooses the blocks with the largest scores. A block's score is the largest score of its
positions. The nearest blocks are always chosen. The FFN is gpt-oss's. All but the first layers have a
shared expert, and experts chosen by a sigmoid plus a bias. MiniMax 2026.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.ops.chosen_attention import attend_chosen, choose_blocks
from vkbackend.meta.plan import Role, rows
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.memory_specs import KVSpec, LayerCache, MemorySpec
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import read_count
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.indexer import MAX_INDEX_HEAD
from vkbackend.ops.moe import Gating


class Model(Decoder):
    mixture = Mixture(gating=Gating("sigmoid"), act="swiglu_oai")

    def read_config(self, gguf: GGUF) -> Config:
        c = super().read_config(gguf)
        keys = "head_count", "key_length", "block_size", "top_k", "local_blocks"
        n_index, self.index_dim, self.block_size, self.n_chosen, self.n_local = (
            read_count(gguf, f"attention.indexer.{key}") for key in keys
        )
        self.indexed = [f"blk.{il}.indexer.q_proj.weight" in gguf.tensors for il in range(len(c.layers))]
        if any(layer.n_head_kv != n_index for layer in c.layers):
            raise UnsupportedModel(f"{n_index} heads of an indexer: one for each kv head is supported")
        if self.index_dim % 8 or not c.layers[0].n_rot <= self.index_dim <= MAX_INDEX_HEAD:
            raise UnsupportedModel(
                f"index keys of {self.index_dim}: multiples of 8 from {c.layers[0].n_rot} (RoPE dimensions) "
                f"to {MAX_INDEX_HEAD} are supported"
            )
        if self.n_local > self.n_chosen:
            raise GGUFError(f"{gguf.paths[0]}: {self.n_local} local blocks exceed {self.n_chosen} (top_k)")
        return c

    # ---- weights ----

    def attention_weights(self, il: int) -> list[WeightSpec]:
        specs = [*super().attention_weights(il), *self.head_norm_weights(il)]
        if not self.indexed[il]:
            return specs
        n, n_embd = self.index_dim, self.config.n_embd
        return [
            *specs,
            WeightSpec(
                "indexer.q_proj.weight", (self.config.layers[il].n_head_kv * n, n_embd), rows("kv_heads")
            ),
            WeightSpec("indexer.k_proj.weight", (n, n_embd), Role("index")),
            WeightSpec("indexer.q_norm.weight", (n,)),
            WeightSpec("indexer.k_norm.weight", (n,)),
        ]

    def kv(self, il: int) -> MemorySpec:
        spec = super().kv(il)
        assert isinstance(spec, KVSpec)
        return replace(spec, index_dim=self.index_dim if self.indexed[il] else 0)

    # ---- graph ----

    def store(self, x: Tensor, w: Weights, cache: LayerCache, il: int) -> None:
        super().store(x, w, cache, il)
        if cache.index:
            ops.kv_store(self.index_vectors(x, w, "k"), cache.index, cache.cells, self.index_dim)

    def attend(self, q: Tensor, x: Tensor, w: Weights, cache: LayerCache, il: int) -> Tensor:
        if cache.index is None:
            return super().attend(q, x, w, cache, il)
        layer, block = self.config.layers[il], self.block_size
        chosen = choose_blocks(
            self.index_vectors(x, w, "q"),
            cache.index,
            cache.cells,
            top_k=self.n_chosen,
            block=block,
            n_local=self.n_local,
        )
        a = attend_chosen(
            q,
            cache.k,
            cache.v,
            cache.cells,
            chosen,
            heads=layer.n_head,
            kv_heads=layer.n_head_kv,
            head_dim_k=layer.head_dim,
            head_dim_v=layer.head_dim_v,
            scale=layer.scale,
            block=block,
        )
        return linear(a, w, "attn_output")

    def index_vectors(self, x: Tensor, w: Weights, name: str) -> Tensor:
        y, n = linear(x, w, f"indexer.{name}_proj"), self.index_dim
        y = ops.head_norm(y, w(f"indexer.{name}_norm"), n, self.config.eps)
        return ops.rope(y, n, half_split=self.half_split)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return ops.swiglu_oai(gate, up)
