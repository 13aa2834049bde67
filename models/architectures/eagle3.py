"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840, section 3.1): a head in a separate file drafts tokens, which its
target model then verifies.

The head reads the states of three of the target's layers at position p - 1, and the token at p:

    g = fc [low; middle; high]                            of position p - 1
    a = g + attention([attn_norm(embed(token)); attn_norm_2(g)])
    x = a + ffn(ffn_norm(a))
    logits = output(output_norm(x))                       of the token at p + 1

To draft further, the head reads its own x at p instead of g. `output` covers only the draft vocabulary; d2t
lists its tokens. In the paper, the input from g at p - 1 and the token at p has position p - 1. Here its cell
and its position in RoPE are p, as in ahead.py. The result is the same, because RoPE depends only on
differences of positions. Cell 0 stays empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.ops.heads import concat
from vkbackend.meta.ops.kept_rows import keep_rows, rows_before
from vkbackend.meta.plan import rows
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Model, Weights, linear
from vkbackend.models.architectures.config import Config, read_layers
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.memory_specs import LayerCache
from vkbackend.models.architectures.reading import MAX_LAYERS, read_count
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable

ARCHITECTURE = "eagle3"
ROPE = "rope_eagle3"
N_STATES = 3


class Head(Decoder):
    """The head's layer. Its tensors have the names in the head's file. Arguments named `layer` look them up
    by short name."""

    freq_factors = True
    half_split = False

    def __init__(self, gguf: GGUF, target: Model) -> None:
        self._path, self._target = gguf.paths[0], target
        self.states = self._read_states(gguf)
        self.norm_before_fc = bool(gguf.boolean(f"{ARCHITECTURE}.norm_before_fc", False))
        self.norm_before_residual = bool(gguf.boolean(f"{ARCHITECTURE}.norm_before_residual", False))
        self.ids = self._read_ids(gguf)
        super().__init__(gguf)
        self._check_shared(gguf)

    # ---- hyper-parameters ----

    def _read_states(self, gguf: GGUF) -> tuple[int, ...]:
        """Return the layers whose inputs the head reads. Layer n_layer means the output of the last layer."""
        key, n_layer = f"{ARCHITECTURE}.target_layers", self._target.n_layer
        states = tuple(int(il) for il in gguf.ints(key))
        if len(states) != N_STATES or not all(0 <= il <= n_layer for il in states):
            raise self._other_target(f"{key} is {list(states)}, expected {N_STATES} layers of 0..{n_layer}")
        n_embd = read_count(gguf, "target_hidden_size")
        if n_embd != self._target.n_embd:
            raise self._other_target(
                f"target_hidden_size is {n_embd}, but the model's embedding_length is {self._target.n_embd}"
            )
        if (n := read_count(gguf, "block_count", limit=MAX_LAYERS)) != 1:
            raise UnsupportedModel(f"{self._path}: {ARCHITECTURE}.block_count is {n}; 1 is supported")
        return states

    def _read_ids(self, gguf: GGUF) -> np.ndarray | None:
        """Return the tokens of the draft vocabulary, int64, or None if it is the model's vocabulary."""
        info = gguf.tensors.get("d2t")
        if info is None:
            return None
        if info.type != "i64" or len(info.shape) != 1 or not info.shape[0]:
            raise GGUFError(f"{self._path}: d2t is {info.type} of shape {info.shape}, expected i64 [tokens]")
        ids = gguf.data("d2t").view("<i8").astype(np.int64)
        n_vocab = self._target.n_vocab
        if ids.min() < 0 or ids.max() >= n_vocab or len(ids) > n_vocab:
            raise self._other_target(
                f"the {len(ids)} tokens of d2t are {ids.min()}..{ids.max()}, but the model has "
                f"0..{n_vocab - 1}"
            )
        return ids

    def _check_shared(self, gguf: GGUF) -> None:
        """Check that the target has the tensors that the head's file lacks."""
        c, n_vocab = self.config, self._target.n_vocab
        if "output.weight" not in gguf.tensors and c.n_vocab != n_vocab:
            raise GGUFError(f"{self._path}: d2t has {c.n_vocab} tokens, but output.weight is missing")
        for name in ("token_embd.weight", "output.weight"):
            if name not in gguf.tensors and c.n_embd != self._target.n_embd:
                raise self._other_target(
                    f"{name} is missing, and the model's has {self._target.n_embd} columns, not {c.n_embd}"
                )

    def _other_target(self, why: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self._path} cannot draft for this model: {why}; use a head that was trained for the model"
        )

    def read_config(self, gguf: GGUF) -> Config:
        layers = tuple(replace(layer, rope=ROPE, first=1) for layer in read_layers(gguf))
        return Config(
            n_embd=read_count(gguf, "embedding_length"),
            n_vocab=self._target.n_vocab if self.ids is None else len(self.ids),
            n_ctx_train=read_count(gguf, "context_length", limit=1 << 31),
            eps=float(gguf.f32(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon")),
            layers=layers,
        )

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        return {ROPE: super().read_ropes(gguf)["rope"]}

    # ---- weights ----

    def unread(self) -> set[str]:
        return {"d2t"}

    def outer_weights(self) -> list[WeightSpec]:
        n, n_states = self.config.n_embd, N_STATES * self._target.n_embd
        vocab = "vocab" if self.ids is None else "draft_vocab"
        optional = [
            WeightSpec("token_embd.weight", (self._target.n_vocab, n), host=True),
            WeightSpec("output.weight", (self.config.n_vocab, n), rows(vocab)),
        ]
        norm = [WeightSpec("enc.output_norm.weight", (n_states,))] if self.norm_before_fc else []
        return [
            *norm,
            WeightSpec("fc.weight", (n, n_states)),
            *(spec for spec in optional if spec.name in self._shapes),
            WeightSpec("output_norm.weight", (n,)),
        ]

    def attention_weights(self, il: int) -> list[WeightSpec]:
        n, wide = self.config.n_embd, ("attn_q", "attn_k", "attn_v")
        return [
            WeightSpec("attn_norm_2", (n,)),
            *(
                replace(spec, shape=(spec.shape[0], 2 * n)) if spec.name in wide else spec
                for spec in super().attention_weights(il)
            ),
        ]

    # ---- graph ----

    def norm(self, x: Tensor, layer: Weights, name: str) -> Tensor:
        return ops.rms_norm(x, layer(name), self.config.eps)

    def fused(self, states: list[Tensor], layer: Weights) -> Tensor:
        """Compute g from the target's states at the same positions."""
        low, middle, high = map(ops.whole, states)
        n = low.width
        x = concat(concat(low, middle, n, n), high, 2 * n, n)
        return linear(self.norm(x, layer, "enc.output_norm") if self.norm_before_fc else x, layer, "fc")

    def entry(self, g: Tensor, graph: Graph, w: Weights, layer: Weights) -> tuple[Tensor, Tensor]:
        """Return attention's input and the residual, for the step's tokens and the rows of g before them."""
        e = ops.embed(graph, layer("token_embd") if layer.has("token_embd") else w("token_embd"))
        e, normed = self.norm(e, layer, "attn_norm"), self.norm(g, layer, "attn_norm_2")
        both = concat(e, normed, e.width, e.width)
        return both, normed if self.norm_before_residual else g

    def prepare(
        self, states: list[Tensor], graph: Graph, w: Weights, layer: Weights, cache: LayerCache
    ) -> None:
        """Store the head's K and V for all rows, and the rows of g that later steps read."""
        assert cache.kept
        g = self.fused(states, layer)
        x, _ = self.entry(rows_before(graph, g, cache.kept), graph, w, layer)
        self.store(x, layer, cache, 0)
        keep_rows(g, cache.kept)

    def draft(self, graph: Graph, w: Weights, layer: Weights, cache: LayerCache) -> Tensor:
        """Compute one row per sequence, and return the output matrix's input."""
        assert cache.kept
        x, h = self.entry(rows_before(graph, None, cache.kept), graph, w, layer)
        h = h + self.attention(x, layer, cache, 0)
        h = h + self.ffn(h, layer, 0)
        keep_rows(h, cache.kept)
        return self.norm(h, layer, "output_norm")


def names_in_model(gguf: GGUF, il: int) -> Mapping[str, str]:
    """Map the names of the head's tensors to names in the target's layer `il`."""
    return {name: name_in_model(name, il) for name in gguf.tensors}


def name_in_model(name: str, il: int) -> str:
    return f"blk.{il}.{name.removeprefix('blk.0.')}"
