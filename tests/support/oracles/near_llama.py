"""Fixtures without experts whose models differ from llama, hunyuan-dense or starcoder2 in few parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from oracles.dense import llama3_factors
from oracles.fixture import Fixture
from oracles.layer_norm import layer_norms
from oracles.parts import HEAD_DIM, N_EMBD, attention, base, feed_forward, fixture, tied


def without_gate(m: Fixture, il: int) -> None:
    for kind in ("weight", "bias"):
        m.tensors.pop(f"blk.{il}.ffn_gate.{kind}", None)


def norm_biases(m: Fixture, il: int) -> None:
    for name in ("attn_norm", "ffn_norm"):
        m.bias(f"blk.{il}.{name}", N_EMBD)


@fixture("arcee")
def arcee(m: Fixture) -> None:
    base(m, 3)
    m.put("rope_freqs.weight", llama3_factors(HEAD_DIM, 1000.0))
    for il in range(3):
        attention(m, il)
        feed_forward(m, il)
        without_gate(m, il)


@fixture("jais2")
def jais2(m: Fixture) -> None:
    base(m, 3)
    layer_norms(m)
    m.bias("output_norm", N_EMBD)
    for il in range(3):
        attention(m, il, bias="qkvo")
        feed_forward(m, il, bias=True)
        without_gate(m, il)
        norm_biases(m, il)


@fixture("orion")
def orion(m: Fixture) -> None:
    base(m, 3)
    layer_norms(m)
    m.bias("output_norm", N_EMBD)
    for il in range(3):
        attention(m, il)
        feed_forward(m, il)
        norm_biases(m, il)


@fixture("xverse")
def xverse(m: Fixture) -> None:
    base(m, 3, n_kv=4)
    for il in range(3):
        attention(m, il)
        feed_forward(m, il)


@fixture("maincoder")
def maincoder(m: Fixture) -> None:
    base(m, 3)
    for il in range(3):
        attention(m, il, head_norms=True)
        feed_forward(m, il)


@fixture("hunyuan_vl")
def hunyuan_vl(m: Fixture) -> None:
    m.alone = "llama.cpp does not rotate the pairs of the fourth section in texts"
    base(m, 3, rope__scaling__alpha=4.0, rope__dimension_sections=[2, 2, 2, 2])
    for il in range(3):
        attention(m, il, head_norms=True)
        feed_forward(m, il)


@fixture("pangu-embedded")
def pangu_embedded(m: Fixture) -> None:
    base(m, 3)
    for il in range(3):
        attention(m, il, bias="qkvo")
        feed_forward(m, il)


@fixture("plamo")
def plamo(m: Fixture) -> None:
    base(m, 3)
    for il in range(3):
        attention(m, il)
        feed_forward(m, il, norm="")


@fixture("plamo3")
def plamo3(m: Fixture) -> None:
    """Build a model with a different RoPE base in the layers with windows, and YaRN in the layer without a
    window."""
    base(
        m, 4, attention__sliding_window=12, attention__sliding_window_pattern=3, rope__freq_base_swa=500.0,
        rope__scaling__type="yarn", rope__scaling__factor=8.0, rope__scaling__original_context_length=32,
    )  # fmt: skip
    for il in range(4):
        attention(m, il, head_norms=True)
        m.put(f"blk.{il}.post_attention_norm", 1 + 0.3 * m.normal(f"blk.{il}.post_attention_norm", N_EMBD))
        feed_forward(m, il)
        m.put(f"blk.{il}.post_ffw_norm", 1 + 0.3 * m.normal(f"blk.{il}.post_ffw_norm", N_EMBD))
        join(m, il, ("attn_q", "attn_k", "attn_v"), "attn_qkv")
        join(m, il, ("ffn_gate", "ffn_up"), "ffn_up")


def join(m: Fixture, il: int, names: Sequence[str], joined: str) -> None:
    parts = [m.tensors.pop(f"blk.{il}.{name}.weight") for name in names]
    m.put(f"blk.{il}.{joined}.weight", np.concatenate(parts))


@fixture("openelm")
def openelm(m: Fixture) -> None:
    """Build layers of different widths and numbers of heads, with tied embeddings."""
    heads, widths = [4, 8, 6], [64, 96, 80]
    base(m, 3, n_head=heads, n_kv=[n // 2 for n in heads], feed_forward_length=widths)
    tied(m, 0.25)
    keys = dict(m.keys)
    for il, (n, n_ff) in enumerate(zip(heads, widths, strict=True)):
        m.keys |= {"attention.head_count": n, "attention.head_count_kv": n // 2, "feed_forward_length": n_ff}
        attention(m, il, head_norms=True)
        feed_forward(m, il)
        join(m, il, ("attn_q", "attn_k", "attn_v"), "attn_qkv")
    m.keys = keys
