"""Mamba-2 layers (Dao and Gu 2024, arXiv:2405.21060). In the file, one matrix contains the rows of z, x, B, C
and dt, and one short convolution is applied to x, B and C. A plan splits z, x and dt by heads, and B and C by
groups of heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.formats import block_of
from vkbackend.meta import ops
from vkbackend.meta.ops.recurrent import ssm_conv
from vkbackend.meta.ops.state_space import gated_norm, ssm_scan
from vkbackend.meta.plan import columns, rows
from vkbackend.meta.policy import Layer, StateSpace
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.memory_specs import LayerMemory, LayerState, MemorySpec, StateSpec
from vkbackend.models.architectures.reading import read_count
from vkbackend.models.architectures.weight_specs import WeightSpec, fused
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.state_space import MAX_SSM_STATE


@dataclass(frozen=True, slots=True)
class Scan:
    """The sizes of a Mamba-2 layer. A head has `size` values. The heads of a group share B and C of `n_state`
    values each."""

    n_head: int
    n_group: int
    size: int
    n_state: int
    d_conv: int

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> Scan:
        names = "time_step_rank", "group_count", "inner_size", "state_size", "conv_kernel"
        n_head, n_group, inner, n_state, d_conv = (read_count(gguf, f"ssm.{name}") for name in names)
        if inner % n_head or n_head % n_group:
            raise GGUFError(
                f"{gguf.paths[0]}: ssm.inner_size {inner} does not fit {n_head} state space heads in "
                f"{n_group} groups"
            )
        if n_state % 16 or n_state > MAX_SSM_STATE or (inner // n_head) % 8 or not 2 <= d_conv <= 16:
            raise UnsupportedModel(
                f"state space heads of {inner // n_head}, states of {n_state}, convolutions of {d_conv}: "
                f"heads of multiples of 8, states of multiples of 16 up to {MAX_SSM_STATE}, convolutions of "
                "2 to 16 are supported"
            )
        return cls(n_head, n_group, inner // n_head, n_state, d_conv)

    @property
    def inner(self) -> int:
        return self.n_head * self.size


class StateSpaceDecoder(Decoder):
    """A decoder whose `recurrent` layers are Mamba-2. Subclasses set `scan` and `recurrent` in
    `read_config`."""

    scan: Scan
    recurrent: Sequence[bool]

    # ---- weights ----

    def attention_weights(self, il: int) -> list[WeightSpec]:
        if not self.recurrent[il]:
            return super().attention_weights(il)
        return [WeightSpec("attn_norm", (self.config.n_embd,)), *self.scan_weights(il)]

    def scan_weights(self, il: int) -> list[WeightSpec]:
        s, n_embd, prefix = self.scan, self.config.n_embd, f"blk.{il}."
        heads, groups, n_bc = rows("ssm_heads"), rows("ssm_groups", (1, 1)), 2 * s.n_group * s.n_state
        projected = [
            WeightSpec("ssm_in_z", (s.inner, n_embd), heads),
            WeightSpec("ssm_in_x", (s.inner, n_embd), heads),
            WeightSpec("ssm_in_bc", (n_bc, n_embd), groups),
            WeightSpec("ssm_in_dt", (s.n_head, n_embd), heads),
        ]
        convolved = [
            WeightSpec("ssm_conv1d_x", (s.inner, s.d_conv), heads, f32=True),
            WeightSpec("ssm_conv1d_bc", (n_bc, s.d_conv), groups, f32=True),
        ]
        norm = WeightSpec("ssm_norm", (s.inner,), heads, stacked=s.n_group)
        return [
            *fused(f"{prefix}ssm_in.weight", projected),
            *fused(f"{prefix}ssm_conv1d.weight", convolved),
            WeightSpec("ssm_dt", (s.n_head,), heads, source=f"{prefix}ssm_dt.bias"),
            WeightSpec("ssm_a", (s.n_head,), heads, source=f"{prefix}ssm_a"),
            WeightSpec("ssm_d", (s.n_head,), heads, source=f"{prefix}ssm_d"),
            *([norm] if self.normed(il) else []),
            WeightSpec("ssm_out", (n_embd, s.inner), columns("ssm_heads")),
        ]

    def normed(self, il: int) -> bool:
        return True

    def kv(self, il: int) -> MemorySpec:
        return self.state(il) if self.recurrent[il] else super().kv(il)

    def state(self, il: int) -> StateSpec:
        s, n_before = self.scan, self.scan.d_conv - 1
        bc = StateSpec(s.n_group, (("conv_bc", (s.n_state * n_before,) * 2),), "ssm_groups")
        arrays = ("conv_x", (s.size * n_before,)), ("scan", (s.n_state * s.size,))
        return StateSpec(s.n_head, arrays, "ssm_heads", extra=bc)

    def layer(self, il: int, types: Mapping[str, str]) -> Layer:
        if not self.recurrent[il]:
            return super().layer(il, types)
        return Layer(self.scan_mixer(il, types), self.feed_forward_of(il, types), "recurrent")

    def scan_mixer(self, il: int, types: Mapping[str, str]) -> StateSpace:
        s, block = self.scan, block_of(types[f"blk.{il}.ssm_out.weight"])[0]
        return StateSpace(s.n_head, s.n_group, s.size, s.n_state, block)

    # ---- graph ----

    def mix(self, x: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        if isinstance(cache, LayerState):
            return self.scanned(x, w, cache)
        return super().mix(x, w, cache, il)

    def scanned(self, x: Tensor, w: Weights, state: LayerState) -> Tensor:
        s, arrays = self.scan, state.arrays
        xs, bc = (
            ssm_conv(
                linear(x, w, f"ssm_in_{part}"),
                w(f"ssm_conv1d_{part}"),
                arrays[f"conv_{part}"],
                w.bias(f"ssm_conv1d_{part}"),
            )
            for part in ("x", "bc")
        )
        vectors = w("ssm_dt"), w("ssm_a"), w("ssm_d")
        y = ssm_scan(
            xs, bc, linear(x, w, "ssm_in_dt"), *vectors, arrays["scan"], head_dim=s.size, n_group=s.n_group
        )
        z = linear(x, w, "ssm_in_z")
        if w.has("ssm_norm"):
            y = gated_norm(z, y, w("ssm_norm"), s.n_group, self.config.eps)
        else:
            y = ops.silu_mul(z, y)
        return linear(y, w, "ssm_out")
