"""Grok in PyTorch, because transformers lacks the model. The equations are from xAI's code for Grok-1 (JAX)
and from SGLang's code for Grok-2."""

from __future__ import annotations

from typing import Any

import torch
from oracles.fixture import Fixture
from oracles.hf_parts import BUILDERS, MAKERS, State
from torch.nn.functional import gelu
from transformers.modeling_outputs import CausalLMOutputWithPast


class GrokConfig:
    tie_word_embeddings = False

    def __init__(self, keys: dict[str, Any], n_layer: int) -> None:
        self.keys, self.n_layer = keys, n_layer


class Layer(torch.nn.Module):
    """A layer over all positions of a sequence. `before` holds earlier k and v."""

    def __init__(self, keys: dict[str, Any], w: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.keys, self.w = keys, w

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.keys["attention.layer_norm_rms_epsilon"]
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.w[f"{name}.weight"]

    def turned(self, x: torch.Tensor, first: int) -> torch.Tensor:
        half = x.shape[-1] // 2
        base = torch.tensor(self.keys["rope.freq_base"], dtype=torch.float64)
        angles = torch.arange(first, first + len(x))[:, None] * base ** -(torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def attention(self, x: torch.Tensor, before: list[torch.Tensor]) -> torch.Tensor:
        k, n = self.keys, len(x)
        heads, kv_heads = k["attention.head_count"], k["attention.head_count_kv"]
        first = len(before[0]) if before else 0
        q, key, value = (
            (x @ self.w[f"attn_{name}.weight"].T).reshape(n, count, -1)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, key = self.turned(q, first), self.turned(key, first)
        before[:] = [
            torch.cat(pair) for pair in zip(before or (key[:0], value[:0]), (key, value), strict=True)
        ]
        key, value = (part.repeat_interleave(heads // kv_heads, 1) for part in before)
        cap = k["attn_logit_softcapping"]
        scores = torch.einsum("ihd,jhd->hij", q, key) * k["attention.output_scale"]
        scores = cap * torch.tanh(scores / cap)
        later = torch.arange(len(key)) > torch.arange(first, first + n)[:, None]
        a = torch.einsum("hij,jhd->ihd", scores.masked_fill(later, -torch.inf).softmax(-1), value)
        return a.reshape(n, -1) @ self.w["attn_output.weight"].T

    def ffn(self, x: torch.Tensor, suffix: str = "", expert: int | None = None) -> torch.Tensor:
        gate, up, down = (self.w[f"ffn_{name}{suffix}.weight"] for name in ("gate", "up", "down"))
        if expert is not None:
            gate, up, down = gate[expert], up[expert], down[expert]
        return (gelu(x @ gate.T, approximate="tanh") * (x @ up.T)) @ down.T

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        k = self.keys
        logits = x @ self.w["ffn_gate_inp.weight"].T
        if cap := k.get("router_logit_softcapping"):
            logits = cap * torch.tanh(logits / cap)
        weights, chosen = logits.softmax(-1).topk(k["expert_used_count"])
        if k.get("expert_weights_norm"):
            weights = weights / weights.sum(-1, keepdim=True)
        rows = [
            sum(g * self.ffn(row, "_exps", int(e)) for g, e in zip(gains, ids, strict=True))
            for row, gains, ids in zip(x, weights, chosen, strict=True)
        ]
        return torch.stack(rows)  # type: ignore[arg-type]

    def forward(self, h: torch.Tensor, before: list[torch.Tensor]) -> torch.Tensor:
        h = h + self.norm(self.attention(self.norm(h, "attn_norm"), before), "attn_output_norm")
        x = self.norm(h, "ffn_norm")
        f = self.experts(x)
        if "ffn_up.weight" in self.w:
            f = (f + self.ffn(x)) / 2**0.5
        last = "post_ffw_norm" if "post_ffw_norm.weight" in self.w else "layer_output_norm"
        return h + self.norm(f, last)


class Grok(torch.nn.Module):
    """The model in float64."""

    def __init__(self, config: GrokConfig) -> None:
        super().__init__()
        self.config = config
        self.w: dict[str, torch.Tensor] = {}

    @property
    def base_model(self) -> torch.nn.Module:
        return self

    def load_state_dict(self, state: dict[str, torch.Tensor], strict: bool = True) -> Any:  # type: ignore[override]
        self.w = {name: values.double() for name, values in state.items()}
        by_layer: list[dict[str, torch.Tensor]] = [{} for _ in range(self.config.n_layer)]
        for name, values in self.w.items():
            if name.startswith("blk."):
                _, il, stem = name.split(".", 2)
                by_layer[int(il)][stem] = values
        self.layers = torch.nn.ModuleList(Layer(self.config.keys, w) for w in by_layer)
        return torch.nn.modules.module._IncompatibleKeys([], [])

    def forward(self, tokens: torch.Tensor, use_cache: bool, past_key_values: Any = None) -> Any:
        k = self.config.keys
        past = past_key_values or [[] for _ in self.layers]
        h = self.w["token_embd.weight"][tokens[0]] * k["embedding_scale"]
        for layer, before in zip(self.layers, past, strict=True):
            h = layer(h, before)
        h = Layer(k, self.w).norm(h, "output_norm")
        logits = h @ self.w["output.weight"].T * k["logit_scale"]
        if cap := k.get("final_logit_softcapping"):
            logits = cap * torch.tanh(logits / cap)
        return CausalLMOutputWithPast(logits=logits[None].float(), past_key_values=past)


def grok(m: Fixture) -> tuple[Any, State]:
    return GrokConfig(m.keys, m.keys["block_count"]), m.tensors


BUILDERS |= {"grok": grok, "grok+norm": grok}
MAKERS[GrokConfig] = Grok
