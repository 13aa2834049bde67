"""qwen3next (Qwen3-Next-80B-A3B): three of four layers are gated delta nets (Yang et al., arXiv:2412.06464)
with short convolutions. The fourth layer has attention with an output gate. All layers have experts and a
gated shared expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.formats import block_of
from vkbackend.meta import ops
from vkbackend.meta.ops.recurrent import delta_gates, delta_net, ssm_conv
from vkbackend.meta.plan import columns, rows
from vkbackend.meta.policy import DeltaNet, Layer
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.ahead import PredictsAhead
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.memory_specs import LayerMemory, LayerState, MemorySpec, StateSpec
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import read_count
from vkbackend.models.architectures.weight_specs import WeightSpec, fused
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.recurrent import MAX_DELTA_HEAD


@dataclass(frozen=True, slots=True)
class Delta:
    """The heads of a gated delta net. A plan splits q, k and v by key heads. `qkv` lists the number of heads
    per key head in each segment of the fused q, k and v. `v` lists the same for v alone."""

    n_k: int
    n_v: int
    size: int  # size of every head
    d_conv: int
    qkv: tuple[int, ...]
    v: tuple[int, ...]


class Model(PredictsAhead):
    mixture: Mixture | None = Mixture()
    pre_ffn_norm = "post_attention_norm"
    tiled = False  # Value head h reads key head h // (n_v / n_k), or h % n_k if tiled.

    def __init__(self, gguf: GGUF) -> None:
        super().__init__(gguf)
        self.delta = self._read_delta(gguf)
        self.recurrent = self._read_recurrent(gguf)

    def _read_delta(self, gguf: GGUF) -> Delta:
        n_k, n_v = (read_count(gguf, f"ssm.{key}") for key in ("group_count", "time_step_rank"))
        size, d_conv = (read_count(gguf, f"ssm.{key}") for key in ("state_size", "conv_kernel"))
        if n_v % n_k or n_v * size != read_count(gguf, "ssm.inner_size"):
            raise GGUFError(
                f"{gguf.paths[0]}: {n_v} value heads of {size} for {n_k} key heads do not fit ssm.inner_size"
            )
        if size % 16 or size > MAX_DELTA_HEAD or not 2 <= d_conv <= 16:
            raise UnsupportedModel(
                f"delta net heads of {size} with convolutions of {d_conv}: sizes that are multiples of 16 up "
                f"to {MAX_DELTA_HEAD}, convolutions of 2 to 16 are supported"
            )
        r = n_v // n_k
        v = (1,) * r if self.tiled else (r,)
        return Delta(n_k, n_v, size, d_conv, (1, 1, *v), v)

    def _read_recurrent(self, gguf: GGUF) -> list[bool]:
        """Return whether each layer is recurrent. The multi-token prediction head is never recurrent."""
        key, n_layer = f"{gguf.architecture}.attention.recurrent_layers", self.n_layer - self.n_ahead
        ahead = [False] * self.n_ahead
        if named := [bool(value) for value in np.ravel(gguf.get(key, []))]:
            if len(named) < n_layer:
                raise GGUFError(f"{gguf.paths[0]}: {key} has {len(named)} values for {n_layer} layers")
            return named[:n_layer] + ahead
        interval = int(gguf.u32(f"{gguf.architecture}.full_attention_interval", 4)) or 4
        return [(il + 1) % interval != 0 for il in range(n_layer)] + ahead

    # ---- weights ----

    def attention_weights(self, il: int) -> list[WeightSpec]:
        if self.recurrent[il]:
            return self.delta_weights(il)
        specs = [*super().attention_weights(il), *self.head_norm_weights(il)]
        layer, n_embd = self.config.layers[il], self.config.n_embd
        return [*specs, WeightSpec("attn_q_gate", (layer.n_head * layer.head_dim, n_embd), rows("heads"))]

    def delta_weights(self, il: int) -> list[WeightSpec]:
        d, n_embd, prefix = self.delta, self.config.n_embd, f"blk.{il}."
        n_qkv, n_values = (2 * d.n_k + d.n_v) * d.size, d.n_v * d.size
        of_qkv, of_v = rows("k_heads", d.qkv), rows("k_heads", d.v)
        return [
            WeightSpec("attn_norm", (n_embd,)),
            WeightSpec("attn_qkv", (n_qkv, n_embd), of_qkv),
            WeightSpec("attn_gate", (n_values, n_embd), of_v),
            WeightSpec("ssm_conv1d", (n_qkv, d.d_conv), of_qkv, f32=True),
            WeightSpec("ssm_beta", (d.n_v, n_embd), of_v),
            WeightSpec("ssm_alpha", (d.n_v, n_embd), of_v),
            WeightSpec("ssm_dt", (d.n_v,), of_v, source=f"{prefix}ssm_dt.bias"),
            WeightSpec("ssm_a", (d.n_v,), of_v, source=f"{prefix}ssm_a"),
            WeightSpec("ssm_norm", (d.size,)),
            WeightSpec("ssm_out", (n_embd, n_values), columns("k_heads", d.v)),
        ]

    def _as_stored(self, specs: list[WeightSpec], prefix: str) -> list[WeightSpec]:
        by_name = {spec.name: spec for spec in super()._as_stored(specs, prefix)}
        q, gate = (by_name.get(f"{prefix}{name}.weight") for name in ("attn_q", "attn_q_gate"))
        if q and gate:  # In attn_q, each head consists of q's rows, then the gate's rows.
            n_head = self.config.layers[int(prefix.split(".")[1])].n_head
            by_name |= {spec.name: spec for spec in fused(q.name, [q, gate], repeat=n_head)}
        beta, alpha = (by_name.get(f"{prefix}{name}.weight") for name in ("ssm_beta", "ssm_alpha"))
        # In ssm_ba, each key head consists of beta's rows, then alpha's rows.
        if beta and alpha and (ba := f"{prefix}ssm_ba.weight") in self._shapes:
            by_name |= {spec.name: spec for spec in fused(ba, [beta, alpha], repeat=self.delta.n_k)}
        qkv, z = (by_name.get(f"{prefix}{name}.weight") for name in ("attn_qkv", "attn_gate"))
        if qkv and z and (old := f"{prefix}ssm_in.weight") in self._shapes:  # older files fuse q, k, v, gate
            d = self.delta
            qkv, z = fused(old, [qkv, z], repeat=d.n_k)
            assert qkv.part
            part = replace(qkv.part, segments=tuple(n * d.size for n in d.qkv))
            by_name |= {qkv.name: replace(qkv, part=part), z.name: z}
        return list(by_name.values())

    def kv(self, il: int) -> MemorySpec:
        if not self.recurrent[il]:
            return super().kv(il)
        d = self.delta
        conv = tuple(n * d.size * (d.d_conv - 1) for n in d.qkv)
        return StateSpec(d.n_k, (("conv", conv), ("delta", tuple(n * d.size * d.size for n in d.v))))

    def layer(self, il: int, types: Mapping[str, str]) -> Layer:
        if not self.recurrent[il]:
            return super().layer(il, types)
        d, block = self.delta, block_of(types[f"blk.{il}.ssm_out.weight"])[0]
        mixer = DeltaNet(d.n_k, d.v[0] * d.size, block)
        return Layer(mixer, self.feed_forward_of(il, types), "recurrent")

    # ---- graph ----

    def mix(self, x: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        if isinstance(cache, LayerState):
            return self.delta_net(x, w, cache)
        return super().mix(x, w, cache, il)

    def gate(self, a: Tensor, x: Tensor, w: Weights) -> Tensor:
        return ops.sigmoid_mul(linear(x, w, "attn_q_gate"), a)

    def delta_net(self, x: Tensor, w: Weights, state: LayerState) -> Tensor:
        d, eps = self.delta, self.config.eps
        qkv = ssm_conv(linear(x, w, "attn_qkv"), w("ssm_conv1d"), state.arrays["conv"])
        alpha, beta = linear(x, w, "ssm_alpha"), linear(x, w, "ssm_beta")
        g, beta = delta_gates(alpha, w("ssm_dt"), w("ssm_a"), beta)
        o = delta_net([qkv], g, beta, state.arrays["delta"], head_dim=d.size, tiled=self.tiled, eps=eps)
        o = ops.head_norm(o, w("ssm_norm"), d.size, eps)
        return linear(self.gate_delta(linear(x, w, "attn_gate"), o), w, "ssm_out")

    def gate_delta(self, gate: Tensor, o: Tensor) -> Tensor:
        """Apply the output gate to the delta net's result `o`."""
        return ops.silu_mul(gate, o)
