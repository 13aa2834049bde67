"""The interface between a model and the engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.policy import Layer
from vkbackend.meta.tensor import Tensor, Weight
from vkbackend.models.architectures.memory_specs import KeyRotation, LayerMemory, MemorySpec
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.rope import RopeTable


class Weights:
    """Weights by short name. `w("attn_q")` returns `<prefix>attn_q.weight`, and `w.bias("attn_q")` the bias
    or None."""

    def __init__(self, weights: Mapping[str, Weight], prefix: str = "") -> None:
        self._weights, self._prefix = weights, prefix

    def layer(self, il: int) -> Weights:
        return self.under(f"blk.{il}.")

    def within(self, prefix: str) -> Weights:
        """Return the weights under this prefix followed by `prefix`."""
        return Weights(self._weights, self._prefix + prefix)

    def under(self, prefix: str) -> Weights:
        return Weights(self._weights, prefix)

    def __call__(self, name: str) -> Weight:
        return self.tensor(f"{name}.weight")

    def tensor(self, name: str) -> Weight:
        return self._weights[f"{self._prefix}{name}"]

    def has(self, name: str) -> bool:
        return f"{self._prefix}{name}.weight" in self._weights

    def bias(self, name: str) -> Weight | None:
        return self.get(f"{name}.bias")

    def get(self, name: str) -> Weight | None:
        return self._weights.get(f"{self._prefix}{name}")


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    """Return x W^T. If the weight has a factor, multiply by it; if it has a bias, add it."""
    if (factor := w.get(f"{name}.factor")) is None:
        return ops.linear(x, w(name), w.bias(name))
    y = ops.mul_vector(ops.linear(x, w(name)), factor)
    return y if (bias := w.bias(name)) is None else ops.add_vector(y, bias)


def all_weights(model: Weighted) -> list[WeightSpec]:
    return [*model.weights(), *model.low_rank]


class Weighted(Protocol):
    """A model whose weights are read from a file."""

    n_layer: int  # Number of layers, including the multi-token prediction heads.
    n_ahead: int  # How many of the last layers are multi-token prediction heads.
    draft_head: Model | None  # The EAGLE-3 head's layer, a model read from the head's file.
    low_rank: Sequence[WeightSpec]  # The weights that adapters add (models/adapters/stacks.py).

    def weights(self) -> list[WeightSpec]: ...
    def unread(self) -> set[str]: ...  # tensors that no device needs


class Model(Weighted, Protocol):
    """An architecture's hyper-parameters, its weights and their roles, and the graph of a step. A model does
    not depend on devices or tensor splits."""

    predicts_ahead: bool  # Whether the architecture's multi-token prediction heads are supported.
    n_vocab: int
    n_embd: int
    n_ctx_train: int
    n_used: int  # Experts per token, or 0.
    control: Mapping[int, np.ndarray]  # Layer -> f32 vector [n_embd] added to the residual after the layer.
    tapped: Collection[int]  # Layers whose inputs an EAGLE-3 head reads.
    differing: Collection[int]  # Layers whose ops differ, although their weights have the same shapes.
    draft_ids: np.ndarray | None  # The token of each logit of the head, or None if logit i is token i.
    n_deepstack: int  # Further rows of images are added after each of the first n layers.
    n_staged: int  # Positions whose residual is stored between stages, or 0 without stages.
    encodes: bool  # Rows attend to later rows, so the model computes only embeddings.
    in_file: frozenset[str]  # Weights that devices read from the mapped file.
    n_adapters: int

    def kv(self, il: int) -> MemorySpec: ...
    def key_rotation(self, il: int) -> KeyRotation | None: ...
    def ropes(self, n_ctx: int) -> dict[str, RopeTable]: ...
    def layer(self, il: int, types: Mapping[str, str]) -> Layer: ...
    def forward(self, graph: Graph, w: Weights, caches: list[LayerMemory]) -> None: ...
