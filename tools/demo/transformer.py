"""A small llama in PyTorch with GGUF's tensor names. PyTorch is imported on use."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from vkbackend.tools.demo.vocabulary import EOS, N_VOCAB_MIN

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Config:
    """The model's 6 KV heads and 9 FFN blocks of 32 split evenly over 3 devices, and almost evenly over 2.

    All rows have multiples of 32 values, as Q8_0 needs. The output matrix is token_embd.
    """

    n_vocab: int = 1024
    n_ctx: int = 512
    n_embd: int = 192
    n_layer: int = 4
    n_head: int = 12
    n_head_kv: int = 6
    n_ff: int = 288
    eps: float = 1e-5
    rope_base: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    def refusal(self, dtype: str) -> str:
        """Return why `dtype` cannot store matrices of these sizes, or ""."""
        if self.n_embd % (2 * self.n_head) or self.n_head % self.n_head_kv:
            return (
                f"{self.n_embd} columns are no {self.n_head} heads of an even size over {self.n_head_kv} kv "
                "heads; choose n_embd as a multiple of 2 n_head, and n_head as one of n_head_kv"
            )
        if dtype == "Q8_0" and (self.n_embd % 32 or self.n_ff % 32):
            return (
                f"Q8_0 has blocks of 32, and rows are {self.n_embd} and {self.n_ff} long; choose --type F16"
            )
        if self.n_vocab < N_VOCAB_MIN:
            return f"{self.n_vocab} tokens do not hold the stories' characters; choose at least {N_VOCAB_MIN}"
        return ""


SIZES = {size.name: size.default for size in fields(Config) if size.type == "int"}
Weights = dict[str, "torch.Tensor"]


def init_weights(config: Config, seed: int) -> Weights:
    """Return random weights of shape [n_out, n_in] by their GGUF names."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    d, kv = config.n_embd, config.n_head_kv * config.head_dim
    shapes = {"token_embd.weight": (config.n_vocab, d), "output_norm.weight": (d,)}
    for i in range(config.n_layer):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (d,),
            f"blk.{i}.attn_q.weight": (d, d),
            f"blk.{i}.attn_k.weight": (kv, d),
            f"blk.{i}.attn_v.weight": (kv, d),
            f"blk.{i}.attn_output.weight": (d, d),
            f"blk.{i}.ffn_norm.weight": (d,),
            f"blk.{i}.ffn_gate.weight": (config.n_ff, d),
            f"blk.{i}.ffn_up.weight": (config.n_ff, d),
            f"blk.{i}.ffn_down.weight": (d, config.n_ff),
        }
    weights: Weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
            continue
        # Weights that add to the residual stream start smaller, so its variance does not grow with depth.
        writes_residual = name.endswith(("attn_output.weight", "ffn_down.weight"))
        std = 0.02 if name == "token_embd.weight" else shape[1] ** -0.5
        std *= (2 * config.n_layer) ** -0.5 if writes_residual else 1.0
        weights[name] = torch.randn(shape, generator=generator) * std
    return {name: weight.requires_grad_() for name, weight in weights.items()}


def rotations(config: Config, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return RoPE's cos and sin [n, head_dim / 2] of the first n positions."""
    import torch

    half = config.head_dim // 2
    inv_freq = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(n, dtype=torch.float64), inv_freq)
    return angle.cos().float(), angle.sin().float()


def block(
    h: torch.Tensor, w: Weights, config: Config, il: int, cos_sin: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Apply layer `il` to the residual h [batch, n, n_embd] (GQA, RoPE on adjacent pairs)."""
    import torch
    import torch.nn.functional as F

    batch, n, _ = h.shape
    blk, (cos, sin) = f"blk.{il}.", cos_sin

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (config.n_embd,), w[name], config.eps)

    def heads(x: torch.Tensor, n_head: int) -> torch.Tensor:
        return x.view(batch, n, n_head, config.head_dim).transpose(1, 2)  # [batch, n_head, n, head_dim]

    def rope(x: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)

    x = norm(h, blk + "attn_norm.weight")
    q = rope(heads(x @ w[blk + "attn_q.weight"].T, config.n_head))
    k = rope(heads(x @ w[blk + "attn_k.weight"].T, config.n_head_kv))
    v = heads(x @ w[blk + "attn_v.weight"].T, config.n_head_kv)
    group = config.n_head // config.n_head_kv
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    h = h + mixed.transpose(1, 2).reshape(batch, n, -1) @ w[blk + "attn_output.weight"].T
    x = norm(h, blk + "ffn_norm.weight")
    gate = F.silu(x @ w[blk + "ffn_gate.weight"].T)
    return h + (gate * (x @ w[blk + "ffn_up.weight"].T)) @ w[blk + "ffn_down.weight"].T


def states(w: Weights, config: Config, h: torch.Tensor) -> torch.Tensor:
    """Run all layers and the last norm on embeddings h. h and the result are [batch, n, n_embd]."""
    import torch.nn.functional as F

    cos_sin = rotations(config, h.shape[1])
    for il in range(config.n_layer):
        h = block(h, w, config, il, cos_sin)
    return F.rms_norm(h, (config.n_embd,), w["output_norm.weight"], config.eps)


def forward(w: Weights, config: Config, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits [batch, n, n_vocab] of tokens [batch, n]."""
    import torch.nn.functional as F

    return states(w, config, F.embedding(tokens, w["token_embd.weight"])) @ w["token_embd.weight"].T


def sample(w: Weights, config: Config, ids: list[int], temperature: float, seed: int) -> list[int]:
    """Generate tokens after `ids` until </s> or until the context is full. Temperature 0 is greedy."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids = list(ids)
    while len(ids) < config.n_ctx and ids[-1] != EOS:
        with torch.no_grad():
            logits = forward(w, config, torch.tensor([ids]))[0, -1]
        if temperature > 0:
            ids.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)))
        else:
            ids.append(int(logits.argmax()))
    return ids
