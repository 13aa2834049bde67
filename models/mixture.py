"""Mixtures of experts (Shazeer et al. 2017): their keys, weights with roles, and the graph from the residual
to the PARTIAL sum of the experts. Keys and tensor names: llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.formats import block_of
from vkbackend.meta import ops
from vkbackend.meta.plan import Role
from vkbackend.meta.policy import FeedForward
from vkbackend.meta.tensor import Tensor
from vkbackend.models.base import Weights, WeightSpec, check_off, read_count
from vkbackend.models.gguf import GGUF
from vkbackend.ops_moe import MAX_EXPERTS, MAX_USED

SOFTMAX = 1  # of expert_gating_func


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of one layer and how they are chosen and weighted."""

    n_expert: int
    n_used: int
    n_ff: int  # of each expert
    scale: float = 1.0  # of the chosen experts' weights

    def weights(self, n_embd: int) -> list[WeightSpec]:
        """Of one layer, names without `blk.N.` and `.weight`."""
        by_rows, by_columns = Role("experts", 1), Role("experts", 2)
        return [
            WeightSpec("ffn_gate_inp", (self.n_expert, n_embd), f32=True),
            WeightSpec("ffn_gate_exps", (self.n_expert, self.n_ff, n_embd), by_rows),
            WeightSpec("ffn_up_exps", (self.n_expert, self.n_ff, n_embd), by_rows),
            WeightSpec("ffn_down_exps", (self.n_expert, n_embd, self.n_ff), by_columns),
        ]

    def feed_forward(self, types: Mapping[str, str], prefix: str) -> FeedForward:
        """What there is to share out, given the types of the tensors; `prefix` is `blk.N.`."""
        return FeedForward(self.n_ff, block_of(types[f"{prefix}ffn_down_exps.weight"])[0], self.n_expert)

    def forward(self, x: Tensor, h: Tensor, norm: str, w: Weights, eps: float) -> Tensor:
        """The experts' sum for x, the norm of the residual h by the weight `norm`."""
        names = (norm, "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
        return ops.moe(x, h, *map(w, names), n_used=self.n_used, eps=eps, scale=self.scale)


def read_mixtures(gguf: GGUF, n_layer: int) -> list[Mixture | None]:
    """The experts of every layer as the keys describe them, None where the layer is dense; other kinds of
    routing are refused."""
    arch = gguf.architecture
    n_expert = int(gguf.u32(f"{arch}.expert_count", 0))
    if not n_expert:
        check_off(gguf, "expert_used_count")
        return [None] * n_layer
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
    own = "expert_feed_forward_length"
    n_ff = read_count(gguf, own if f"{arch}.{own}" in gguf.metadata else "feed_forward_length")
    scale = float(gguf.f32(f"{arch}.expert_weights_scale", 0.0)) or 1.0
    return [Mixture(n_expert, n_used, n_ff, scale)] * n_layer
