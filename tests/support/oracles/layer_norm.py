"""Fixtures with LayerNorm."""

from __future__ import annotations

from math import sqrt

from oracles.fixture import Fixture
from oracles.parts import (
    EXPERTS,
    HEAD_DIM,
    N_EMBD,
    N_FF,
    N_FF_EXP,
    attention,
    base,
    feed_forward,
    fixture,
    mixture,
    tied,
)


def layer_norms(m: Fixture) -> None:
    m.keys["attention.layer_norm_epsilon"] = m.keys.pop("attention.layer_norm_rms_epsilon")


@fixture("cohere2")
def cohere2(m: Fixture) -> None:
    base(m, 5, attention__sliding_window=16, logit_scale=0.5)
    layer_norms(m)
    tied(m, 0.25)
    for il in range(5):
        attention(m, il)
        feed_forward(m, il, norm="")


@fixture("command-r")
def command_r(m: Fixture) -> None:
    base(m, 3, logit_scale=0.5)
    layer_norms(m)
    tied(m, 0.25)
    for il in range(3):
        attention(m, il)
        feed_forward(m, il, norm="")


@fixture("starcoder2")
def starcoder2(m: Fixture) -> None:
    base(m, 3)
    layer_norms(m)
    m.bias("output_norm", N_EMBD)
    for il in range(3):
        attention(m, il, bias="qkvo")
        feed_forward(m, il, bias=True)
        del m.tensors[f"blk.{il}.ffn_gate.weight"], m.tensors[f"blk.{il}.ffn_gate.bias"]
        for name in ("attn_norm", "ffn_norm"):
            m.bias(f"blk.{il}.{name}", N_EMBD)


@fixture("stablelm")
def stablelm(m: Fixture) -> None:
    base(m, 3, rope__dimension_count=HEAD_DIM // 4)
    layer_norms(m)
    m.bias("output_norm", N_EMBD)
    for il in range(3):
        attention(m, il, bias="qkv")
        feed_forward(m, il)
        for name in ("attn_norm", "ffn_norm"):
            m.bias(f"blk.{il}.{name}", N_EMBD)


@fixture("gpt2")
def gpt2(m: Fixture) -> None:
    base(m, 3, n_kv=4)
    layer_norms(m)
    m.bias("output_norm", N_EMBD)
    m.matrix("position_embd", m.keys["context_length"], N_EMBD, gain=sqrt(N_EMBD))
    del m.tensors["output.weight"]
    for name in ("rope.dimension_count", "rope.freq_base", "attention.key_length", "attention.value_length"):
        del m.keys[name]
    for il in range(3):
        p = f"blk.{il}."
        for name in ("attn_norm", "ffn_norm"):
            m.norm(p + name, N_EMBD)
            m.bias(p + name, N_EMBD)
        m.matrix(p + "attn_qkv", 3 * N_EMBD, N_EMBD, gain=1.3, bias=True)
        m.matrix(p + "attn_output", N_EMBD, N_EMBD, bias=True)
        m.matrix(p + "ffn_up", N_FF, N_EMBD, bias=True)
        m.matrix(p + "ffn_down", N_EMBD, N_FF, gain=2.0, bias=True)


@fixture("cohere2moe")
def cohere2moe(m: Fixture) -> None:
    n_layer = 6
    base(
        m, n_layer, **EXPERTS, logit_scale=0.5, attention__sliding_window=16, leading_dense_block_count=1,
        attention__sliding_window_pattern=[il not in (0, 4) for il in range(n_layer)], expert_gating_func=2,
        expert_weights_norm=True, expert_shared_count=1, expert_shared_feed_forward_length=N_FF_EXP,
    )  # fmt: skip
    layer_norms(m)
    m.tensors["token_embd.weight"] /= 4
    for il in range(n_layer):
        attention(m, il)
        if il == 0:
            feed_forward(m, il, norm="")
            continue
        mixture(m, il, norm="")
        feed_forward(m, il, norm="", suffix="_shexp")


@fixture("cohere2moe+rms")
def cohere2moe_rms(m: Fixture) -> None:
    base(
        m, 3, **EXPERTS, logit_scale=0.5, attention__sliding_window=16, leading_dense_block_count=0,
        attention__sliding_window_pattern=[False, True, True],
    )  # fmt: skip
    tied(m, 0.25)
    for il in range(3):
        attention(m, il)
        mixture(m, il, norm="")
