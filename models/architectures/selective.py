"""Mamba-1 layers (Gu and Dao 2023, arXiv:2312.00752). Every channel has a state with a decay per value. A
plan splits channels as if each were a key head of size 1. All channels share dt (before its projection), B
and C. One product computes all three, and the devices sum it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vkbackend.errors import UnsupportedModel
from vkbackend.formats import block_of
from vkbackend.meta import ops
from vkbackend.meta.ops.recurrent import ssm_conv
from vkbackend.meta.ops.state_space import selective_scan
from vkbackend.meta.plan import columns, rows
from vkbackend.meta.policy import DeltaNet, Layer
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.memory_specs import LayerMemory, LayerState, MemorySpec, StateSpec
from vkbackend.models.architectures.reading import read_count
from vkbackend.models.architectures.weight_specs import WeightSpec, fused
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.state_space import MAX_SSM_STATE


@dataclass(frozen=True, slots=True)
class Selection:
    """The sizes of a Mamba-1 layer with `inner` channels. If `normed`, dt, B and C pass RMS norms, whose
    weights are optional."""

    inner: int
    n_state: int
    dt_rank: int
    d_conv: int
    normed: bool

    @classmethod
    def from_gguf(cls, gguf: GGUF, normed: bool = False) -> Selection:
        names = "inner_size", "state_size", "time_step_rank", "conv_kernel"
        inner, n_state, dt_rank, d_conv = (read_count(gguf, f"ssm.{name}") for name in names)
        if n_state % 4 or n_state > MAX_SSM_STATE or not 2 <= d_conv <= 16:
            raise UnsupportedModel(
                f"states of {n_state}, convolutions of {d_conv}: states of multiples of 4 up to "
                f"{MAX_SSM_STATE}, convolutions of 2 to 16 are supported"
            )
        normed = gguf.boolean(f"{gguf.architecture}.ssm.dt_b_c_rms", normed)
        return cls(inner, n_state, dt_rank, d_conv, normed)

    @property
    def shared(self) -> dict[str, int]:
        """Sizes of dt (before its projection), B and C, in the order of their product's columns."""
        return {"dt": self.dt_rank, "b": self.n_state, "c": self.n_state}


class SelectiveDecoder(Decoder):
    """A decoder whose `recurrent` layers are Mamba-1. Subclasses set `selection` and `recurrent` in
    `read_config`."""

    selection: Selection
    recurrent: Sequence[bool]

    # ---- weights ----

    def attention_weights(self, il: int) -> list[WeightSpec]:
        if not self.recurrent[il]:
            return super().attention_weights(il)
        s, n_embd, prefix, channels = self.selection, self.config.n_embd, f"blk.{il}.", rows("k_heads")
        halves = [WeightSpec(f"ssm_in_{half}", (s.inner, n_embd), channels) for half in ("x", "z")]
        norms = {f"ssm_{name}_norm": n for name, n in s.shared.items()}
        return [
            WeightSpec("attn_norm", (n_embd,)),
            *fused(f"{prefix}ssm_in.weight", halves),
            WeightSpec("ssm_conv1d", (s.inner, s.d_conv), channels, f32=True),
            WeightSpec("ssm_x", (sum(s.shared.values()), s.inner), columns("k_heads")),
            WeightSpec("ssm_dt", (s.inner, s.dt_rank), channels),
            *(
                WeightSpec(name, (n,))
                for name, n in norms.items()
                if f"{prefix}{name}.weight" in self._shapes
            ),
            WeightSpec("ssm_a", (s.inner, s.n_state), channels, source=f"{prefix}ssm_a", f32=True),
            WeightSpec("ssm_d", (s.inner,), channels, source=f"{prefix}ssm_d"),
            WeightSpec("ssm_out", (n_embd, s.inner), columns("k_heads")),
        ]

    def kv(self, il: int) -> MemorySpec:
        if not self.recurrent[il]:
            return super().kv(il)
        s = self.selection
        return StateSpec(s.inner, (("conv", (s.d_conv - 1,)), ("scan", (s.n_state,))))

    def layer(self, il: int, types: Mapping[str, str]) -> Layer:
        if not self.recurrent[il]:
            return super().layer(il, types)
        return Layer(self.channels(il, types), self.feed_forward_of(il, types), "recurrent")

    def channels(self, il: int, types: Mapping[str, str]) -> DeltaNet:
        blocks = (block_of(types[f"blk.{il}.{name}.weight"])[0] for name in ("ssm_x", "ssm_out"))
        return DeltaNet(self.selection.inner, 1, math.lcm(*blocks))

    # ---- graph ----

    def mix(self, x: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        if not isinstance(cache, LayerState):
            return super().mix(x, w, cache, il)
        taps, arrays = w("ssm_conv1d"), cache.arrays
        xs = ssm_conv(linear(x, w, "ssm_in_x"), taps, arrays["conv"], w.bias("ssm_conv1d"))
        dt, b, c = self.shared_by_channels(linear(xs, w, "ssm_x"), w)
        y = selective_scan(xs, linear(dt, w, "ssm_dt"), b, c, w("ssm_a"), w("ssm_d"), arrays["scan"])
        return linear(ops.silu_mul(linear(x, w, "ssm_in_z"), y), w, "ssm_out")

    def shared_by_channels(self, product: Tensor, w: Weights) -> list[Tensor]:
        """Return dt, B and C, the columns of the product, after their norms."""
        parts, at = [], 0
        for name, n in self.selection.shared.items():
            part, at = ops.columns(product, at, at + n), at + n
            if self.selection.normed or w.has(f"ssm_{name}_norm"):
                part = ops.head_norm(part, w.get(f"ssm_{name}_norm.weight"), n, self.config.eps)
            parts.append(part)
        return parts
