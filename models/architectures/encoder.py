"""Encoders in the form of BERT: a layer norm after each sum, and token types. Every token of a text attends
to all others. Devlin et al. 2018, arXiv:1810.04805.
"""

from __future__ import annotations

from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.decoder_weights import DecoderWeights
from vkbackend.models.architectures.layer_normed import LayerNormed
from vkbackend.models.architectures.memory_specs import KeyRotation, LayerMemory
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.ops import TYPES

TYPES_TABLE = "token_types.weight"


class Encoder(LayerNormed):
    """If `gated`, the FFN has a gate with the activation `activate`. Otherwise its activation is GELU."""

    causal = False
    pre_norms = False
    gated = False

    @property
    def n_types(self) -> int:
        """Return the number of token types, or 0 if the file has no table of types."""
        shape = self._shapes.get(TYPES_TABLE, ())
        return shape[0] if len(shape) > 1 else len(shape)

    def outer_weights(self) -> list[WeightSpec]:
        n, e = self.n_types, self.n_embd
        specs = [
            WeightSpec("token_embd.weight", (self.n_vocab, e), host=True),
            WeightSpec("token_embd_norm.weight", (e,)),
        ]
        if n:
            specs.append(WeightSpec(TYPES_TABLE, (n, e) if n > 1 else (e,), f32=True))
        return self.norm_weights(specs, "")

    def attention_weights(self, il: int) -> list[WeightSpec]:
        specs = [*DecoderWeights.attention_weights(self, il), WeightSpec("attn_output_norm", (self.n_embd,))]
        return self.norm_weights(specs, f"blk.{il}.")

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        specs = DecoderWeights.feed_forward_weights(self, il)
        return self.norm_weights([*specs, WeightSpec("layer_output_norm", (self.n_embd,))], f"blk.{il}.")

    def embed(self, graph: Graph, w: Weights) -> Tensor:
        h = super().embed(graph, w)
        if self.n_types > 1:
            h = h + ops.embed(graph, w("token_types"), TYPES)
        elif self.n_types:
            h = ops.add_vector(h, w("token_types"))
        return self.norm(self.positioned(h, w), w, "token_embd_norm")

    def positioned(self, h: Tensor, w: Weights) -> Tensor:
        """Add the embeddings of positions. The default returns `h`, for models with RoPE or ALiBi."""
        return h

    def block(self, h: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        h = self.norm(h + self.mix(h, w, cache, il), w, "attn_output_norm")
        return self.norm(h + self.ffn(h, w, il), w, "layer_output_norm")

    def ffn(self, h: Tensor, w: Weights, il: int) -> Tensor:
        return self.feed_forward(h, w, il)

    def output_norm(self, x: Tensor, w: Weights) -> Tensor:
        return x

    def key_rotation(self, il: int) -> KeyRotation | None:
        return None
