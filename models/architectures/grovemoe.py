"""grovemoe (GroveMoE): qwen3moe with a small second expert per group of consecutive experts. If an expert is
chosen, its group's second expert reads the same input with the same weight, times a constant. Wu et al. 2025,
arXiv:2508.07785.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vkbackend.errors import GGUFError
from vkbackend.formats import block_of
from vkbackend.meta import ops
from vkbackend.meta.ops.experts import Experts, Router, moe
from vkbackend.meta.plan import Role
from vkbackend.meta.policy import FeedForward
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures import qwen3moe
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.reading import read_count, read_float
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF


class Model(qwen3moe.Model):
    def __init__(self, gguf: GGUF) -> None:
        super().__init__(gguf)
        self.per_group = read_count(gguf, "experts_per_group")
        self.n_second = read_count(gguf, "expert_chunk_feed_forward_length")
        self.second_scale = read_float(gguf, "expert_group_scale", 0.0)
        n_expert = read_count(gguf, "expert_count")
        if n_expert % self.per_group:
            raise GGUFError(
                f"{gguf.paths[0]}: {n_expert} experts are no multiple of {self.per_group} per group"
            )
        self.n_group = n_expert // self.per_group

    def expert_weights(self, il: int) -> list[WeightSpec]:
        n, n_ff, n_embd = self.n_group, self.n_second, self.config.n_embd
        return [
            *super().expert_weights(il),
            WeightSpec("ffn_gate_chexps", (n, n_ff, n_embd), Role("ffn", 1)),
            WeightSpec("ffn_up_chexps", (n, n_ff, n_embd), Role("ffn", 1)),
            WeightSpec("ffn_down_chexps", (n, n_embd, n_ff), Role("ffn", 2)),
        ]

    def feed_forward_of(self, il: int, types: Mapping[str, str]) -> FeedForward:
        block = block_of(types[f"blk.{il}.ffn_down_chexps.weight"])[0]
        return replace(super().feed_forward_of(il, types), n_ff_shared=self.n_second, shared_block=block)

    def ffn(self, h: Tensor, w: Weights, il: int) -> Tensor:
        eps, mixture, norm = self.config.eps, self.config.layers[il].mixture, w(self.pre_ffn_norm)
        assert mixture
        x = ops.rms_norm(h, norm, eps)
        gating = replace(mixture.gating, scale=self.second_scale, per_id=self.per_group)
        router = Router(norm, w("ffn_gate_inp"), eps, gating, mixture.n_used)
        second = Experts(w("ffn_gate_chexps"), w("ffn_up_chexps"), w("ffn_down_chexps"))
        return mixture.forward(x, h, norm, w, eps) + moe(x, h, router, second)
