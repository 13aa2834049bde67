"""rwkv7 (RWKV-7 "Goose"): instead of attention, each head has a matrix as state. A row removes its key's old
value from the matrix and adds the new value. Both halves of a layer mix each row with the row before it. Peng
et al. 2025, arXiv:2503.14456.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.formats import block_of
from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.ops.rwkv import share, token_shift, wkv, wkv_keys, wkv_norm
from vkbackend.meta.plan import MIRROR, columns, rows
from vkbackend.meta.policy import DeltaNet, FeedForward, Layer
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.layer_normed import LayerNormed
from vkbackend.models.architectures.memory_specs import LayerMemory, LayerState, MemorySpec, StateSpec
from vkbackend.models.architectures.mixers_alone import ALONE
from vkbackend.models.architectures.reading import read_count, read_n_layer
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.rwkv import MAX_WKV_HEAD
from vkbackend.rope import RopeTable

HEADS = rows("k_heads")
MIXED = 6  # inputs of time mixing: for receptance, decay, key, value, rate and gate
NORM_EPS = 64e-5  # the epsilon of the norm of heads
FIRST_VALUES = "values of the first layer"
RANKS = {"w": "decay", "a": "iclr", "v": "value_residual_mix", "g": "gate"}


class Model(LayerNormed):
    pre_ffn_norm = "attn_norm_2"
    differing = (0,)

    def read_config(self, gguf: GGUF) -> Config:
        n_embd, self.size = (read_count(gguf, name) for name in ("embedding_length", "wkv.head_size"))
        self.ranks = {name: read_count(gguf, f"attention.{key}_lora_rank") for name, key in RANKS.items()}
        if n_embd % self.size:
            raise GGUFError(f"{gguf.paths[0]}: {n_embd} channels are not a multiple of heads of {self.size}")
        if self.size % 4 or self.size > MAX_WKV_HEAD:
            raise UnsupportedModel(f"heads of {self.size}: multiples of 4 up to {MAX_WKV_HEAD} are supported")
        layer = replace(ALONE, n_ff=read_count(gguf, "feed_forward_length"))
        return Config.from_gguf(gguf, norm_key="layer_norm_epsilon", layers=(layer,) * read_n_layer(gguf))

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        return {}

    def unread(self) -> set[str]:
        return super().unread() | {f"blk.0.time_mix_v{i}.weight" for i in range(3)}

    # ---- weights ----

    def outer_weights(self) -> list[WeightSpec]:
        norm = WeightSpec("token_embd_norm.weight", (self.config.n_embd,))
        return [*super().outer_weights(), *self.norm_weights([norm], "")]

    def attention_weights(self, il: int) -> list[WeightSpec]:
        n, p = self.config.n_embd, "time_mix_"
        low_rank = [name for name in RANKS if il or name != "v"]
        vectors = [f"{name}0" for name in low_rank if name != "g"] + ["k_k", "k_a", "r_k", "ln"]
        specs = [
            WeightSpec("attn_norm", (n,)),
            WeightSpec(f"{p}lerp_fused", (MIXED, n), f32=True),
            *(WeightSpec(f"{p}{name}", (n, n), HEADS) for name in ("receptance", "key")),
            WeightSpec(f"{p}value", (n, n), HEADS if il else MIRROR),
            *(WeightSpec(f"{p}{name}1", (self.ranks[name], n)) for name in low_rank),
            *(WeightSpec(f"{p}{name}2", (n, self.ranks[name]), HEADS) for name in low_rank),
            *(WeightSpec(p + name, (n,), HEADS) for name in vectors),
            WeightSpec(f"{p}ln.bias", (n,), HEADS),
            WeightSpec(f"{p}output", (n, n), columns("k_heads")),
        ]
        return self.norm_weights(specs, f"blk.{il}.")

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        n, n_ff = self.config.n_embd, self.config.layers[il].n_ff
        specs = [
            WeightSpec("attn_norm_2", (n,)),
            WeightSpec("channel_mix_lerp_k", (1, n), f32=True),
            WeightSpec("channel_mix_key", (n_ff, n), rows("ffn")),
            WeightSpec("channel_mix_value", (n, n_ff), columns("ffn")),
        ]
        return self.norm_weights(specs, f"blk.{il}.")

    def kv(self, il: int) -> MemorySpec:
        n, size = self.config.n_embd, self.size
        before = StateSpec(1, (("time_shift", (n,)), ("channel_shift", (n,))), "shifts")
        return StateSpec(n // size, (("wkv", (size * size,)),), "k_heads", extra=before)

    def layer(self, il: int, types: Mapping[str, str]) -> Layer:
        output, down = (
            block_of(types[f"blk.{il}.{name}.weight"])[0] for name in ("time_mix_output", "channel_mix_value")
        )
        heads = DeltaNet(self.config.n_embd // self.size, self.size, output, shifts=True)
        return Layer(heads, FeedForward(self.config.layers[il].n_ff, down), "recurrent")

    # ---- graph ----

    def embed(self, graph: Graph, w: Weights) -> Tensor:
        return self.norm(super().embed(graph, w), w, "token_embd_norm")

    def block(self, h: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        assert isinstance(cache, LayerState)
        h = h + self.mix(self.norm(h, w, "attn_norm"), w, cache, il)
        shift = w("channel_mix_lerp_k"), cache.arrays["channel_shift"]
        [x] = token_shift(self.norm(h, w, self.pre_ffn_norm), *shift)
        return h + linear(ops.relu2(linear(x, w, "channel_mix_key")), w, "channel_mix_value")

    def mix(self, x: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        assert isinstance(cache, LayerState)
        w, size = w.within("time_mix_"), self.size
        of_r, of_decay, of_k, of_v, of_rate, of_gate = token_shift(
            x, w("lerp_fused"), cache.arrays["time_shift"]
        )
        r = linear(of_r, w, "receptance")
        decay = projected(ops.softcap(linear(of_decay, w, "w1"), 1.0), w, "w")
        rate = projected(linear(of_rate, w, "a1"), w, "a")
        key, removed, added = wkv_keys(linear(of_k, w, "key"), rate, w("k_k"), w("k_a"), size)
        v = self.values(of_v, r, w)
        y = wkv(r, decay, key, v, removed, added, cache.arrays["wkv"], size)
        y = wkv_norm(y, r, key, v, w("r_k"), w("ln"), w.tensor("ln.bias"), size, NORM_EPS)
        gate = linear(ops.sigmoid(linear(of_gate, w, "g1")), w, "g2")
        return linear(ops.mul(gate, y), w, "output")

    def values(self, x: Tensor, like: Tensor, w: Weights) -> Tensor:
        """Return v, mixed with the first layer's v, split like `like`."""
        kept, v = x.graph.kept, linear(x, w, "value")
        if not w.has("v1"):
            kept[FIRST_VALUES] = v
            return share(v, like)
        mixed = projected(linear(x, w, "v1"), w, "v")
        return v + ops.sigmoid_mul(mixed, share(kept[FIRST_VALUES], like) + ops.scale(v, -1.0))


def projected(x: Tensor, w: Weights, name: str) -> Tensor:
    """Multiply by the second matrix of a low-rank pair, and add the bias."""
    return ops.linear(x, w(f"{name}2"), w(f"{name}0"))
