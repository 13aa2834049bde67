"""Mixtures of experts (Shazeer et al. 2017): their GGUF keys, weights and graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.formats import block_of
from vkbackend.meta import ops
from vkbackend.meta.ops.experts import Experts, Router, moe
from vkbackend.meta.plan import Role, columns, rows
from vkbackend.meta.policy import FeedForward
from vkbackend.meta.tensor import Tensor, Weight
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.reading import check_off, read_count, read_float
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import MAX_EXPERTS, MAX_GROUPS, MAX_USED, Gating

GATING_KINDS = {1: "softmax", 2: "sigmoid", 3: "softmax_weight", 4: "root_softplus"}  # expert_gating_func
GATE_AND_UP = ("ffn_gate_exps.bias", "ffn_up_exps.bias")
BY_TOKEN = "ffn_gate_by_token"  # for each token, the ids of its experts; the architecture adds it
SOFTMAX = Gating()
GLU = {"silu": ops.silu_mul, "gelu": ops.gelu_mul, "swiglu_oai": ops.swiglu_oai, "relu": ops.relu_mul}
ALONE = {"relu2_alone": ops.relu2, "gelu_alone": ops.gelu}  # activations without a gate


@dataclass(frozen=True, slots=True)
class Mixture:
    """A layer's experts, their gating, and the shared expert. Biases and the factors of experts are optional
    in the file."""

    n_expert: int = 0
    n_used: int = 0
    n_ff: int = 0  # Columns of each expert.
    gating: Gating = SOFTMAX
    act: str = "silu"
    weighs_input: bool = False  # The router's weight multiplies the expert's input instead of its result.
    n_shared: int = 0  # Columns of the shared expert, or 0.
    limit: float = 0.0  # Upper bound of the experts' silu, and bound of |up| (0: none).
    limit_shared: float = 0.0  # The `limit` of the shared expert.
    limits_gate: bool = False  # `limit` bounds silu's argument instead of its result.
    n_latent: int = 0  # Experts read and write a latent vector of this size (0: the residual's size).
    situ: tuple[float, float] | None = None  # The soft-caps of situ_mul, instead of `act`.

    def weights(self, n_embd: int, stored: Collection[str]) -> list[WeightSpec]:
        """Return the layer's weights, named without `blk.N.` and `.weight`. `stored` holds the layer's tensor
        names in the file, without `blk.N.`."""
        e, n_ff, shared = self.n_expert, self.n_ff, self.n_shared
        n = self.n_latent or n_embd
        specs = [
            WeightSpec("ffn_gate_inp", (e, n_embd), f32=True),
            WeightSpec("ffn_gate_exps", (e, n_ff, n), Role("experts", 1)),
            WeightSpec("ffn_up_exps", (e, n_ff, n), Role("experts", 1)),
            WeightSpec("ffn_down_exps", (e, n, n_ff), Role("experts", 2)),
        ]
        if self.n_latent:
            specs += [WeightSpec("ffn_routed_down", (n, n_embd)), WeightSpec("ffn_routed_up", (n_embd, n))]
        if shared:
            specs += [
                WeightSpec("ffn_gate_shexp", (shared, n_embd), rows("ffn")),
                WeightSpec("ffn_up_shexp", (shared, n_embd), rows("ffn")),
                WeightSpec("ffn_down_shexp", (n_embd, shared), columns("ffn")),
            ]
        optional = [
            WeightSpec("ffn_gate_inp.bias", (e,)),
            WeightSpec("exp_probs_b.bias", (e,)),
            *(WeightSpec(name, (e, n_ff, 1), Role("experts", 1), f32=True) for name in GATE_AND_UP),
            WeightSpec("ffn_down_exps.bias", (e, n_embd), f32=True),
            WeightSpec("ffn_down_exps.scale", (e,)),
            *([WeightSpec("ffn_routed_norm.weight", (n,))] if self.n_latent else []),
        ]
        if shared:
            optional.append(WeightSpec("ffn_gate_inp_shexp.weight", (1, n_embd)))
        names = {*stored, *(GATE_AND_UP if "ffn_gate_up_exps.bias" in stored else ())}
        if self.act in ALONE:
            specs = [spec for spec in specs if spec.name not in ("ffn_gate_exps", "ffn_gate_shexp")]
        return specs + [spec for spec in optional if spec.name in names]

    def feed_forward(self, types: Mapping[str, str], prefix: str) -> FeedForward:
        down, shared = (types.get(f"{prefix}ffn_down_{kind}.weight", "f32") for kind in ("exps", "shexp"))
        return FeedForward(self.n_ff, block_of(down)[0], self.n_expert, self.n_shared, block_of(shared)[0])

    def forward(self, x: Tensor, h: Tensor, norm: Weight, w: Weights, eps: float) -> Tensor:
        """Return the weighted sum of the chosen experts' results for x, plus the shared expert's result. The
        router reads norm(h). A table in the file may choose experts by the row's token."""
        router = Router(
            norm,
            w("ffn_gate_inp"),
            eps,
            self.gating,
            self.n_used,
            w.bias("ffn_gate_inp"),
            w.bias("exp_probs_b"),
            w.get("ffn_down_exps.scale"),
            ops.embed(h.graph, w(BY_TOKEN)) if w.has(BY_TOKEN) else None,
        )
        gate, up, down = "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"
        biases = w.bias(gate), w.bias(up), w.bias(down)
        matrices = None if self.act in ALONE else w(gate), w(up), w(down)
        bounds = self.limit, self.limits_gate, self.situ
        experts = Experts(*matrices, *biases, self.act, self.weighs_input, *bounds)
        y = moe(linear(x, w, "ffn_routed_down") if self.n_latent else x, h, router, experts)
        if self.n_latent:
            y = ops.rms_norm(y, w("ffn_routed_norm"), eps) if w.has("ffn_routed_norm") else y
            y = linear(y, w, "ffn_routed_up")
        return y + self.shared(x, w) if self.n_shared else y

    def shared(self, x: Tensor, w: Weights) -> Tensor:
        """Return the shared expert's result. If the file has a gate, its sigmoid multiplies each row."""
        up = linear(x, w, "ffn_up_shexp")
        if self.act in ALONE:
            y = linear(ALONE[self.act](up), w, "ffn_down_shexp")
        else:
            gate = linear(x, w, "ffn_gate_shexp")
            y = linear(self.activated_shared(gate, up), w, "ffn_down_shexp")
        return ops.gate_rows(linear(x, w, "ffn_gate_inp_shexp"), y) if w.has("ffn_gate_inp_shexp") else y

    def activated_shared(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.situ:
            return ops.situ_mul(gate, up, *self.situ)
        if self.limit_shared:
            clamped = ops.silu_of_clamped if self.limits_gate else ops.silu_mul_clamped
            return clamped(gate, up, self.limit_shared)
        return GLU[self.act](gate, up)


def read_mixtures(gguf: GGUF, n_layer: int, default: Mixture) -> list[Mixture | None]:
    arch = gguf.architecture
    n_expert = int(gguf.u32(f"{arch}.expert_count", 0))
    if not n_expert:
        check_off(gguf, "expert_used_count")
        return [None] * n_layer
    n_used = read_count(gguf, "expert_used_count")
    if n_used > n_expert:
        raise GGUFError(
            f"{gguf.paths[0]}: expert_used_count is {n_used}, expected at most {n_expert} (expert_count)"
        )
    if n_expert > MAX_EXPERTS or n_used > MAX_USED:
        raise UnsupportedModel(
            f"{n_used} of {n_expert} experts per token: up to {MAX_USED} of {MAX_EXPERTS} are supported"
        )
    key = "expert_feed_forward_length"
    n_ff = read_count(gguf, key if int(gguf.u32(f"{arch}.{key}", 0)) else "feed_forward_length")
    n_shared = int(gguf.u32(f"{arch}.expert_shared_feed_forward_length", 0))
    mixture = replace(
        default,
        n_expert=n_expert,
        n_used=n_used,
        n_ff=n_ff,
        gating=_read_gating(gguf, n_expert, n_used, default.gating),
        n_shared=n_shared or n_ff * int(gguf.u32(f"{arch}.expert_shared_count", 0)) or default.n_shared,
    )
    n_dense = int(gguf.u32(f"{arch}.leading_dense_block_count", 0))
    return [None if il < n_dense else mixture for il in range(n_layer)]


def _read_gating(gguf: GGUF, n_expert: int, n_used: int, default: Gating) -> Gating:
    arch = gguf.architecture
    kind = int(gguf.u32(f"{arch}.expert_gating_func", 0))  # 0: the architecture's default
    if kind and kind not in GATING_KINDS:
        known = ", ".join(f"{number} ({name})" for number, name in GATING_KINDS.items())
        raise UnsupportedModel(f"{arch}.expert_gating_func = {kind} is not supported; there are: {known}")
    n_group = int(gguf.u32(f"{arch}.expert_group_count", 0)) or 1
    n_group_used = read_count(gguf, "expert_group_used_count") if n_group > 1 else 1
    size, rest = divmod(n_expert, n_group)
    if n_group > 1 and (
        rest or size < 2 or n_group > MAX_GROUPS or not n_used / size <= n_group_used <= n_group
    ):
        raise GGUFError(
            f"{gguf.paths[0]}: {n_used} of {n_expert} experts cannot come from {n_group_used} of "
            f"{n_group} groups"
        )
    return replace(
        default,
        kind=GATING_KINDS.get(kind, default.kind),
        norm_w=gguf.boolean(f"{arch}.expert_weights_norm", default.norm_w),
        scale=read_float(gguf, "expert_weights_scale", 1.0),
        n_group=n_group,
        n_group_used=n_group_used,
    )
