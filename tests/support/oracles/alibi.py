"""Fixtures with ALiBi."""

from __future__ import annotations

from oracles.earlier import SIZES, fuse_qkv, without
from oracles.fixture import Fixture
from oracles.layer_norm import layer_norms
from oracles.parts import N_EMBD, attention, base, feed_forward, fixture


@fixture("mpt")
def mpt(m: Fixture) -> None:
    base(
        m, 3, n_kv=4, attention__clamp_kqv=1.25, attention__max_alibi_bias=8.0, feed_forward_length=4 * N_EMBD
    )
    layer_norms(m)
    del m.tensors["output.weight"]
    for il in range(3):
        attention(m, il)
        fuse_qkv(m, il)
        feed_forward(m, il)
    without(m, "ffn_gate", "attention.head_count_kv", "rope.freq_base", *SIZES)


@fixture("bloom")
def bloom(m: Fixture) -> None:
    """Build a model with six heads, because the slopes have another formula if the number of heads is not a
    power of two."""
    base(m, 3, n_head=6, n_kv=6, feed_forward_length=4 * 96, embedding_length=96)
    m.tensors.clear()
    m.matrix("token_embd", 128, 96, gain=4.0)
    for name in ("token_embd_norm", "output_norm"):
        m.norm(name, 96)
    for il in range(3):
        p = f"blk.{il}."
        m.norm(p + "attn_norm", 96)
        m.matrix(p + "attn_qkv", 3 * 96, 96, gain=1.3, bias=True)
        m.matrix(p + "attn_output", 96, 96, bias=True)
        m.norm(p + "ffn_norm", 96)
        m.matrix(p + "ffn_up", 4 * 96, 96, bias=True)
        m.matrix(p + "ffn_down", 96, 4 * 96, gain=2.0, bias=True)
    without(m, "attention.head_count_kv", "rope.freq_base", *SIZES)
    for name in [name for name in m.tensors if name.endswith("_norm.weight")]:
        m.bias(name.removesuffix(".weight"), 96)
    layer_norms(m)


def llama_layers(m: Fixture) -> None:
    for il in range(m.keys["block_count"]):
        attention(m, il)
        feed_forward(m, il)


@fixture("refact")
def refact(m: Fixture) -> None:
    base(m, 3, n_kv=1)
    del m.tensors["output.weight"]
    llama_layers(m)
    without(m, "rope.freq_base", *SIZES)


def baichuan_layers(m: Fixture, n_layer: int) -> None:
    base(m, n_layer, n_kv=4)
    llama_layers(m)
    without(m, *SIZES[:2])


@fixture("baichuan")
def baichuan(m: Fixture) -> None:
    m.alone = "llama.cpp needs 32 layers for RoPE and 40 layers for ALiBi"
    baichuan_layers(m, 3)


@fixture("baichuan+alibi")
def baichuan_alibi(m: Fixture) -> None:
    m.alone = "llama.cpp needs 32 layers for RoPE and 40 layers for ALiBi"
    baichuan_layers(m, 3)
    m.keys["attention.max_alibi_bias"] = 8.0
