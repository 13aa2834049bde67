"""A model with the EAGLE-3 head of a second file as its last layer (eagle3.py)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from vkbackend.errors import UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.policy import Layer
from vkbackend.models.architectures.base import Model, Weights
from vkbackend.models.architectures.decoder import Decoder, tap_of
from vkbackend.models.architectures.eagle3 import Head, name_in_model, names_in_model
from vkbackend.models.architectures.memory_specs import (
    KeyRotation,
    KVSpec,
    LayerCache,
    LayerMemory,
    MemorySpec,
)
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable


class WithHead:
    """Adds the tensors of `head` to `gguf`, named as a layer after the target's layers."""

    predicts_ahead = True
    n_ahead = 1

    def __init__(self, target: Decoder, gguf: GGUF, head: GGUF) -> None:
        if target.encodes or type(target).residual_is_wide:
            raise UnsupportedModel(f"{head.paths[0]}: EAGLE-3 does not support {gguf.architecture} models")
        self.target = target
        self._head = Head(head, target)
        self.draft_head: Model | None = self._head
        self._il, self.n_layer = target.n_layer, target.n_layer + 1
        target.tapped = frozenset(self._head.states)
        self.tapped: Collection[int] = target.tapped
        self.differing: Collection[int] = target.differing
        self.draft_ids = self._head.ids
        self.n_vocab, self.n_embd, self.n_ctx_train = target.n_vocab, target.n_embd, target.n_ctx_train
        self.n_used, self.encodes, self.n_staged = target.n_used, False, 0
        self.n_deepstack = target.n_deepstack
        self.in_file: frozenset[str] = frozenset()
        self.low_rank: Sequence[WeightSpec] = ()
        self.n_adapters = 0
        gguf.attach(head, names_in_model(head, self._il))

    @property
    def control(self) -> Mapping[int, np.ndarray]:
        return self.target.control

    @control.setter
    def control(self, vectors: Mapping[int, np.ndarray]) -> None:
        self.target.control = vectors

    def weights(self) -> list[WeightSpec]:
        return [*self.target.weights(), *map(self._in_model, self._head.weights())]

    def _in_model(self, spec: WeightSpec) -> WeightSpec:
        part = spec.part and replace(spec.part, tensor=name_in_model(spec.part.tensor, self._il))
        return replace(spec, name=name_in_model(spec.name, self._il), part=part)

    def unread(self) -> set[str]:
        of_head = {*self._head.unread(), "rope_freqs.weight"}
        return {*self.target.unread(), *(name_in_model(name, self._il) for name in of_head)}

    def kv(self, il: int) -> MemorySpec:
        if il < self._il:
            return self.target.kv(il)
        spec = self._head.kv(0)
        assert isinstance(spec, KVSpec)
        return replace(spec, n_kept=self._head.n_embd)

    def key_rotation(self, il: int) -> KeyRotation | None:
        return self.target.key_rotation(il) if il < self._il else self._head.key_rotation(0)

    def ropes(self, n_ctx: int) -> dict[str, RopeTable]:
        return self.target.ropes(n_ctx) | self._head.ropes(n_ctx)

    def layer(self, il: int, types: Mapping[str, str]) -> Layer:
        if il < self._il:
            return self.target.layer(il, types)
        prefix = f"blk.{il}."
        own = {name.replace(prefix, "blk.0."): t for name, t in types.items() if name.startswith(prefix)}
        return self._head.layer(0, own)

    def forward(self, graph: Graph, w: Weights, caches: list[LayerMemory]) -> None:
        *layers, cache = caches
        assert isinstance(cache, LayerCache)
        layer = w.layer(self._il)
        if graph.kind.wanted.ahead:
            with graph.scope(f"blk.{self._il}"):
                x = self._head.draft(graph, w, layer, cache)
            ops.logits(ops.outputs(x), layer("output") if layer.has("output") else w("output"))
            return
        h = self.target.residual(graph, w, layers)
        self.target.head(h, graph, w)
        # h replaces the output of the last layer, and inputs that a trace of fewer layers lacks.
        states = [graph.kept.get(tap_of(il), h) for il in self._head.states]
        with graph.scope(f"blk.{self._il}"):
            self._head.prepare(states, graph, w, layer, cache)
