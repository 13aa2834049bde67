"""modern-bert (ModernBERT, granite-embedding R2, gte-reranker-modernbert): layer norms before attention and
FFN, RoPE, and a gated FFN with GELU.

Every third layer attends to the complete text. The others have a window on both sides and another RoPE base.
Warner et al. 2024, arXiv:2412.13663.
"""

from __future__ import annotations

from vkbackend.errors import UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.config import Config, with_windows
from vkbackend.models.architectures.layer_normed import LayerNormed
from vkbackend.models.architectures.memory_specs import LayerMemory
from vkbackend.models.architectures.reading import read_flags, read_float
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable

PERIOD = 3
ACTIVATIONS = {"gelu": ops.gelu_mul, "silu": ops.silu_mul}


class Model(LayerNormed):
    causal = False
    windows = True

    def read_config(self, gguf: GGUF) -> Config:
        c, arch = super().read_config(gguf), gguf.architecture
        # llama.cpp's converter writes hidden_activation; other files may have hidden_act.
        act = gguf.string(f"{arch}.hidden_activation", gguf.string(f"{arch}.hidden_act", "gelu"))
        if act not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise UnsupportedModel(f"{arch}.hidden_activation = {act!r} is not supported; there are: {known}")
        self.act = ACTIVATIONS[act]
        window = int(gguf.u32(f"{arch}.attention.sliding_window", 0))
        return with_windows(c, window, self._read_windowed(gguf, len(c.layers)), "rope_swa") if window else c

    def _read_windowed(self, gguf: GGUF, n_layer: int) -> tuple[bool, ...]:
        """Return whether each layer has a window. Without flags in the file, layers 0, n, 2n and so on have
        no window."""
        key = "attention.sliding_window_pattern"
        name = f"{gguf.architecture}.{key}"
        if name in gguf.metadata and gguf.metadata.kind(name)[1]:
            return read_flags(gguf, key, n_layer)
        period = int(gguf.u32(name, PERIOD))
        return tuple(not period or il % period > 0 for il in range(n_layer))

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        tables = super().read_ropes(gguf)
        base = read_float(gguf, "rope.freq_base_swa", 10_000.0)
        return tables | {"rope_swa": RopeTable(tables["rope"].n_rot, base)}

    def outer_weights(self) -> list[WeightSpec]:
        norm = WeightSpec("token_embd_norm.weight", (self.n_embd,))
        return [*super().outer_weights(), *self.norm_weights([norm], "")]

    def attention_weights(self, il: int) -> list[WeightSpec]:
        specs = super().attention_weights(il)
        return (
            specs if self._has_norm(il) else [spec for spec in specs if not spec.name.startswith("attn_norm")]
        )

    def _has_norm(self, il: int) -> bool:
        return f"blk.{il}.attn_norm.weight" in self._shapes

    def embed(self, graph: Graph, w: Weights) -> Tensor:
        return self.norm(super().embed(graph, w), w, "token_embd_norm")

    def attention_input(self, h: Tensor, w: Weights, il: int) -> Tensor:
        return self.norm(h, w, "attn_norm") if self._has_norm(il) else h

    def block(self, h: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        h = h + self.mix(self.attention_input(h, w, il), w, cache, il)
        return h + self.feed_forward(self.norm(h, w, self.pre_ffn_norm), w, il)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.act(gate, up)
