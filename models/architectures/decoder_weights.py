"""The hyper-parameters and weights of the decoder in decoder.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from vkbackend.errors import UnsupportedModel
from vkbackend.formats import block_of
from vkbackend.meta.plan import MIRROR, columns, rows
from vkbackend.meta.policy import Attention, FeedForward, Layer
from vkbackend.models.architectures.base import Model
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.memory_specs import KVSpec, MemorySpec
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import (
    ROPE_FACTORS,
    check_off,
    read_deepstack,
    read_factors,
    read_n_ahead,
    read_rope,
    read_scales,
)
from vkbackend.models.architectures.weight_specs import WeightSpec, fused
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable

RESIDUALS = "staged_residuals"  # f32 [n_staged, n_embd], for an encoder that computes in stages


class DecoderWeights:
    """The decoder's weights. Subclasses override the attributes below."""

    mixture: Mixture | None = None  # Defaults of the experts' hyper-parameters, or None.
    freq_factors = False
    windows = False  # Whether attention.sliding_window applies.
    clamps = False  # Whether attention.clamp_kqv applies.
    interleaved_sections = False  # RoPE's sections.
    half_split = True  # RoPE pairs element i with i + n_rot / 2 (False: with its neighbour).
    pre_ffn_norm = "ffn_norm"
    pre_norms = True  # Norms before attention and FFN.
    gated = True
    causal = True  # Rows do not attend to later rows, unless the file's attention.causal differs.
    differing: Collection[int] = ()  # Layers whose ops differ, although their weights have the same shapes.
    post_norms = False  # Norms after attention and FFN, before the residual sum.

    def __init__(self, gguf: GGUF) -> None:
        if not self.mixture:
            check_off(gguf, "expert_count")
            check_off(gguf, "expert_used_count")
        if not self.clamps:
            check_off(gguf, "attention.clamp_kqv")
        if not self.freq_factors:
            for name in set(ROPE_FACTORS) & set(gguf.tensors):
                raise UnsupportedModel(f"{gguf.paths[0]}: {name} is not supported for {gguf.architecture}")
        self.n_ahead = read_n_ahead(gguf)
        self.config = c = self.read_config(gguf)
        if not self.windows:
            self._check_no_window(gguf)
        self.rope_tables = self.read_ropes(gguf)
        self.n_layer, self.n_vocab = len(c.layers), c.n_vocab
        self.n_embd, self.n_ctx_train = c.n_embd, c.n_ctx_train
        self.n_used = max(layer.mixture.n_used if layer.mixture else 0 for layer in c.layers)
        self.control: Mapping[int, np.ndarray] = {}
        self.encodes = not gguf.boolean(f"{gguf.architecture}.attention.causal", self.causal)
        self.tapped: Collection[int] = ()
        self.draft_head: Model | None = None
        self.draft_ids: np.ndarray | None = None
        self.n_staged = 0
        self.n_deepstack = read_deepstack(gguf, self.n_layer)
        self.in_file: frozenset[str] = frozenset()
        self.low_rank: Sequence[WeightSpec] = ()
        self.n_adapters = 0
        self._scales = read_scales(gguf)
        self._shapes = {name: info.shape for name, info in gguf.tensors.items()}

    # ---- hyper-parameters ----

    def read_config(self, gguf: GGUF) -> Config:
        return Config.from_gguf(gguf, self.mixture)

    def _check_no_window(self, gguf: GGUF) -> None:
        name = f"{gguf.architecture}.attention.sliding_window"
        if (window := gguf.u32(name, 0)) and window < self.config.n_ctx_train:
            raise UnsupportedModel(
                f"{name} = {window} is not supported; only windows of at least the context length "
                f"{self.config.n_ctx_train} are"
            )

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        """Return the RoPE tables by name. The table "rope_long" replaces "rope" beyond the original context
        length."""
        [n_rot] = {layer.n_rot for layer in self.config.layers}
        freqs, long, short = (read_factors(gguf, name) for name in ROPE_FACTORS)
        n_ctx = self.config.n_ctx_train
        factors = freqs if short is None else short
        tables = {"rope": read_rope(gguf, n_rot, n_ctx, factors, self.interleaved_sections)}
        return tables if long is None else tables | {"rope_long": read_rope(gguf, n_rot, n_ctx, long)}

    # ---- weights ----

    def unread(self) -> set[str]:
        # Kernels that quantize inputs to NVFP4 read the scales of inputs.
        of_inputs = {name.replace(".scale", ".input_scale") for name in self._scales}
        return {*self._scales, *of_inputs} | ({"output.weight"} if self.encodes else set())

    def outer_weights(self) -> list[WeightSpec]:
        c = self.config
        specs = [
            WeightSpec("token_embd.weight", (c.n_vocab, c.n_embd), host=True),
            WeightSpec("output_norm.weight", (c.n_embd,)),
            WeightSpec("output.weight", (c.n_vocab, c.n_embd), rows("vocab"), source="token_embd.weight"),
        ]
        if "output.bias" in self._shapes:
            specs.append(WeightSpec("output.bias", (c.n_vocab,), rows("vocab")))
        return specs[:2] if self.encodes else specs

    def weights(self) -> list[WeightSpec]:
        c, specs = self.config, self.outer_weights()
        if self.n_staged:
            nothing = np.zeros((self.n_staged, c.n_embd), np.float32)
            specs.append(WeightSpec(f"{RESIDUALS}.weight", nothing.shape, values=nothing))
        for il in range(self.n_layer):
            if (values := self.control.get(il)) is not None:
                specs.append(WeightSpec(f"blk.{il}.control_vector.weight", (c.n_embd,), values=values))
            layer = self.layer_weights(il)
            layer = [replace(spec, name=_full(f"blk.{il}.", spec.name)) for spec in layer]
            for spec in self._as_stored(layer, f"blk.{il}."):
                specs.append(spec)
                in_file = spec.name if spec.name in self._shapes else spec.source or spec.name
                stored = spec.part.tensor if spec.part else in_file
                role = MIRROR if spec.role.axis else spec.role
                if (factor := self._scales.get(_named(stored, "scale"))) is not None:
                    values = np.full(spec.shape[0], factor, np.float32)
                    specs.append(WeightSpec(_named(spec.name, "factor"), values.shape, role, values=values))
                takes_bias = len(spec.shape) == 2 and (spec.role.dim or spec.part)
                if takes_bias and (bias := _named(stored, "bias")) in self._shapes:
                    part = spec.part and replace(spec.part, tensor=bias)
                    name = _named(spec.name, "bias")
                    specs.append(WeightSpec(name, spec.shape[:1], role, source=bias, part=part))
        return specs

    def _as_stored(self, specs: list[WeightSpec], prefix: str) -> list[WeightSpec]:
        """If the file fuses weights, as in attn_qkv or ffn_gate_up_exps, describe each as a part of the fused
        tensor."""
        by_name = {spec.name: spec for spec in specs}
        for names, tensor in (
            (("attn_q.weight", "attn_k.weight", "attn_v.weight"), "attn_qkv.weight"),
            (("ffn_gate.weight", "ffn_up.weight"), "ffn_up.weight"),
            (("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), "ffn_up_shexp.weight"),
            (("ffn_gate_exps.weight", "ffn_up_exps.weight"), "ffn_gate_up_exps.weight"),
            (("ffn_gate_exps.bias", "ffn_up_exps.bias"), "ffn_gate_up_exps.bias"),
        ):
            group = [by_name[prefix + name] for name in names if prefix + name in by_name]
            if len(group) == len(names) and group[0].name not in self._shapes:
                *repeat, _, n_in = group[0].shape  # `repeat` is [n_expert] or empty.
                n_rows = sum(spec.shape[-2] for spec in group)
                if self._shapes.get(prefix + tensor) in ((*repeat, n_rows, n_in), (*repeat, n_rows)):
                    by_name |= {spec.name: spec for spec in fused(prefix + tensor, group, *repeat)}
        return list(by_name.values())

    def layer_weights(self, il: int) -> list[WeightSpec]:
        return [*self.attention_weights(il), *self.feed_forward_weights(il)]

    def attention_weights(self, il: int) -> list[WeightSpec]:
        """Return the layer's attention weights, named without `blk.N.` and `.weight`."""
        n_embd, layer = self.config.n_embd, self.config.layers[il]
        q, k = layer.n_head * layer.head_dim, layer.n_head_kv * layer.head_dim
        o, v = layer.n_head * layer.head_dim_v, layer.n_head_kv * layer.head_dim_v
        specs = [
            *([WeightSpec("attn_norm", (n_embd,))] if self.pre_norms else []),
            WeightSpec("attn_q", (q, n_embd), rows("heads")),
            WeightSpec("attn_k", (k, n_embd), rows("kv_heads")),
            WeightSpec("attn_v", (v, n_embd), rows("kv_heads")),
            WeightSpec("attn_output", (n_embd, o), columns("heads")),
        ]
        return [*specs, WeightSpec("post_attention_norm", (n_embd,))] if self.post_norms else specs

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        n_embd, layer = self.config.n_embd, self.config.layers[il]
        norms = [WeightSpec(self.pre_ffn_norm, (n_embd,))] if self.pre_norms else []
        if self.post_norms:
            norms.append(WeightSpec("post_ffw_norm", (n_embd,)))
        return [*norms, *(self.expert_weights(il) if layer.mixture else self.dense_weights(il))]

    def expert_weights(self, il: int) -> list[WeightSpec]:
        mixture, prefix = self.config.layers[il].mixture, f"blk.{il}."
        assert mixture
        stored = {name.removeprefix(prefix) for name in self._shapes if name.startswith(prefix)}
        return mixture.weights(self.config.n_embd, stored)

    def dense_weights(self, il: int) -> list[WeightSpec]:
        n_embd, layer = self.config.n_embd, self.config.layers[il]
        gate = [WeightSpec("ffn_gate", (layer.n_ff, n_embd), rows("ffn"))] if self.gated else []
        return [
            *gate,
            WeightSpec("ffn_up", (layer.n_ff, n_embd), rows("ffn")),
            WeightSpec("ffn_down", (n_embd, layer.n_ff), columns("ffn")),
        ]

    def head_norm_weights(self, il: int) -> list[WeightSpec]:
        names = "attn_q_norm", "attn_k_norm"
        return [WeightSpec(name, (self.config.layers[il].head_dim,)) for name in names]

    def kv(self, il: int) -> MemorySpec:
        layer = self.config.layers[il]
        # An encoder's step contains the complete text, so the cache needs cells for all positions.
        window = 0 if self.encodes else layer.window or layer.chunk
        return KVSpec(layer.n_head_kv, layer.head_dim, layer.head_dim_v, window=window)

    def ropes(self, n_ctx: int) -> dict[str, RopeTable]:
        tables = dict(self.rope_tables)
        long = tables.pop("rope_long", None)
        return tables | {"rope": long} if long and n_ctx > long.orig_ctx else tables

    def layer(self, il: int, types: Mapping[str, str]) -> Layer:
        return Layer(self.attention_of(il, types), self.feed_forward_of(il, types))

    def attention_of(self, il: int, types: Mapping[str, str]) -> Attention:
        layer, block = self.config.layers[il], block_of(types[f"blk.{il}.attn_output.weight"])[0]
        return Attention(layer.n_head, layer.n_head_kv, layer.head_dim, layer.head_dim_v, block)

    def feed_forward_of(self, il: int, types: Mapping[str, str]) -> FeedForward:
        layer, prefix = self.config.layers[il], f"blk.{il}."
        if layer.mixture:
            return layer.mixture.feed_forward(types, prefix)
        return FeedForward(layer.n_ff, block_of(types[f"{prefix}ffn_down.weight"])[0])


def _full(prefix: str, name: str) -> str:
    return f"{prefix}{name}" if "." in name else f"{prefix}{name}.weight"


def _named(name: str, kind: str) -> str:
    return f"{name.removesuffix('.weight')}.{kind}"
