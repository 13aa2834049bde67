"""Fixtures of encoders. The golden values of encoders are hidden states instead of logits."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

from oracles.fixture import N_VOCAB, Fixture
from oracles.parts import HEAD_DIM, N_EMBD, N_EXPERT, N_FF, attention, base, feed_forward

BUILDERS: dict[str, Callable[[Fixture], None]] = {}
N_HEAD, N_CTX = 4, 96


def encoder(name: str) -> Callable[[Callable[[Fixture], None]], Callable[[Fixture], None]]:
    def register(make: Callable[[Fixture], None]) -> Callable[[Fixture], None]:
        BUILDERS[name] = make
        return make

    return register


def build(name: str) -> Fixture:
    fixture = Fixture(name, name.split("+")[0])
    BUILDERS[name](fixture)
    return fixture


def layer_norm(m: Fixture, name: str, bias: bool = True) -> None:
    m.norm(name, N_EMBD)
    if bias:
        m.bias(name, N_EMBD)


def post_normed(m: Fixture, n_layer: int = 3, n_types: int = 2, *, bias: bool, **keys: Any) -> None:
    """Add all parts of BERT's layers except the FFN."""
    m.keys |= {
        "block_count": n_layer,
        "context_length": N_CTX,
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEAD,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.causal": False,
        "pooling_type": 1,
        "tokenizer.ggml.token_type_count": n_types,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    m.matrix("token_embd", N_VOCAB, N_EMBD, gain=sqrt(N_EMBD))
    m.matrix("token_types", n_types, N_EMBD, gain=sqrt(N_EMBD) / 2)
    layer_norm(m, "token_embd_norm")
    for il in range(n_layer):
        p = f"blk.{il}."
        for name, gain in (("attn_q", 1.5), ("attn_k", 1.5), ("attn_v", 1.0), ("attn_output", 1.0)):
            m.matrix(p + name, N_EMBD, N_EMBD, gain=gain, bias=bias)
        layer_norm(m, p + "attn_output_norm")
        layer_norm(m, p + "layer_output_norm")


def plain_ffn(m: Fixture, il: int) -> None:
    m.matrix(f"blk.{il}.ffn_up", N_FF, N_EMBD, bias=True)
    m.matrix(f"blk.{il}.ffn_down", N_EMBD, N_FF, gain=2.0, bias=True)


@encoder("bert")
def bert(m: Fixture) -> None:
    post_normed(m, bias=True)
    m.matrix("position_embd", N_CTX, N_EMBD, gain=sqrt(N_EMBD) / 2)
    for il in range(3):
        plain_ffn(m, il)


@encoder("bert+roberta")
def roberta(m: Fixture) -> None:
    """A reranker with one token type and a head of two layers."""
    post_normed(m, n_types=1, bias=True)
    m.keys["pooling_type"] = 4
    m.matrix("position_embd", N_CTX, N_EMBD, gain=sqrt(N_EMBD) / 2)
    for il in range(3):
        plain_ffn(m, il)
    m.matrix("cls", N_EMBD, N_EMBD, bias=True)
    m.matrix("cls.output", 1, N_EMBD, bias=True)


@encoder("nomic-bert")
def nomic_bert(m: Fixture) -> None:
    post_normed(m, bias=False, rope__freq_base=1000.0)
    for il in range(3):
        feed_forward(m, il, norm="")


@encoder("nomic-bert-moe")
def nomic_bert_moe(m: Fixture) -> None:
    experts = {"expert_count": N_EXPERT, "expert_used_count": 2, "moe_every_n_layers": 2}
    post_normed(m, 4, n_types=1, bias=True, rope__freq_base=1000.0, **experts)
    for il in range(4):
        if il % 2 == 0:
            plain_ffn(m, il)
            continue
        p = f"blk.{il}.ffn_"
        m.matrix(p + "gate_inp", N_EXPERT, N_EMBD, gain=2.0)
        m.matrix(p + "up_exps", N_EXPERT, N_FF, N_EMBD)
        m.matrix(p + "down_exps", N_EXPERT, N_EMBD, N_FF, gain=2.0)


@encoder("jina-bert-v2")
def jina_bert_v2(m: Fixture) -> None:
    post_normed(m, bias=True, attention__max_alibi_bias=8.0)
    for il in range(3):
        p = f"blk.{il}.ffn_"
        m.matrix(p + "gate", N_FF, N_EMBD)
        m.matrix(p + "up", N_FF, N_EMBD)
        m.matrix(p + "down", N_EMBD, N_FF, gain=2.0, bias=True)


@encoder("jina-bert-v3")
def jina_bert_v3(m: Fixture) -> None:
    post_normed(m, n_types=1, bias=True, rope__freq_base=1000.0)
    for il in range(3):
        plain_ffn(m, il)


@encoder("modern-bert")
def modern_bert(m: Fixture) -> None:
    """A reranker. Windows of 12 positions are shorter than the prompt."""
    n_layer = 5
    m.keys |= {
        "block_count": n_layer,
        "context_length": N_CTX,
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEAD,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.causal": False,
        "attention.sliding_window": 12,
        "rope.freq_base": 3000.0,
        "rope.freq_base_swa": 700.0,
        "pooling_type": 4,
    }
    m.matrix("token_embd", N_VOCAB, N_EMBD, gain=sqrt(N_EMBD))
    layer_norm(m, "token_embd_norm", bias=False)
    layer_norm(m, "output_norm", bias=False)
    for il in range(n_layer):
        p = f"blk.{il}."
        if il:
            layer_norm(m, p + "attn_norm", bias=False)
        layer_norm(m, p + "ffn_norm", bias=False)
        m.matrix(p + "attn_qkv", 3 * N_EMBD, N_EMBD, gain=1.5)
        m.matrix(p + "attn_output", N_EMBD, N_EMBD)
        m.matrix(p + "ffn_up", 2 * N_FF, N_EMBD)
        m.matrix(p + "ffn_down", N_EMBD, N_FF, gain=2.0)
    m.matrix("cls", N_EMBD, N_EMBD)
    layer_norm(m, "cls.norm", bias=False)
    m.matrix("cls.output", 1, N_EMBD, bias=True)


@encoder("eurobert")
def eurobert(m: Fixture) -> None:
    base(m, 3)
    m.keys |= {"attention.causal": False, "pooling_type": 1}
    del m.tensors["output.weight"]
    for il in range(3):
        attention(m, il)
        feed_forward(m, il)


@encoder("neo-bert")
def neo_bert(m: Fixture) -> None:
    base(m, 3, n_kv=N_HEAD)
    m.keys |= {"attention.causal": False, "pooling_type": 2}
    for name in ("attention.key_length", "attention.value_length", "attention.head_count_kv"):
        del m.keys[name]
    m.tensors["enc.output_norm.weight"] = m.tensors.pop("output_norm.weight")
    del m.tensors["output.weight"]
    for il in range(3):
        p = f"blk.{il}."
        m.norm(p + "attn_norm", N_EMBD)
        m.norm(p + "ffn_norm", N_EMBD)
        m.matrix(p + "attn_qkv", 3 * N_EMBD, N_EMBD, gain=1.5)
        m.matrix(p + "attn_output", N_EMBD, N_EMBD)
        m.matrix(p + "ffn_up", 2 * N_FF, N_EMBD)
        m.matrix(p + "ffn_down", N_EMBD, N_FF, gain=2.0)


@encoder("gemma-embedding")
def gemma_embedding(m: Fixture) -> None:
    """Windows of 12 positions are shorter than the prompt. Two dense layers follow the pooling."""
    base(m, 7, n_kv=1, attention__sliding_window=12)
    m.keys |= {"attention.causal": False, "pooling_type": 1, "rope.freq_base_swa": 300.0}
    m.keys["attention.sliding_window_pattern"] = [il % 6 < 5 for il in range(7)]
    del m.tensors["output.weight"]
    m.tensors["token_embd.weight"] /= sqrt(N_EMBD)
    for il in range(7):
        attention(m, il, head_norms=True)
        feed_forward(m, il)
        m.norm(f"blk.{il}.post_attention_norm", N_EMBD)
        m.norm(f"blk.{il}.post_ffw_norm", N_EMBD)
    m.matrix("dense_2", 2 * N_EMBD, N_EMBD)
    m.matrix("dense_3", N_EMBD, 2 * N_EMBD)


@encoder("llama+encoder")
def llama_encoder(m: Fixture) -> None:
    """A decoder in which every token attends to all others, such as llama-embed-nemotron."""
    base(m, 3)
    m.keys |= {"attention.causal": False, "pooling_type": 1}
    for il in range(3):
        attention(m, il)
        feed_forward(m, il)


__all__ = ["BUILDERS", "HEAD_DIM", "build"]
