"""Fixtures with Mamba-1 or Mamba-2 layers."""

from __future__ import annotations

from typing import Any

import numpy as np
from oracles.dense import GRANITE, llama3_factors
from oracles.fixture import Fixture
from oracles.parts import (
    EXPERTS,
    HEAD_DIM,
    N_EMBD,
    N_EXPERT,
    N_FF,
    N_FF_EXP,
    attention,
    base,
    feed_forward,
    fixture,
    mixture,
    selection_bias,
)

SIZE, N_STATE = 16, 16


def scan(m: Fixture, il: int, *, normed: bool = True) -> None:
    p, n_head, n_group = f"blk.{il}.", m.keys["ssm.time_step_rank"], m.keys["ssm.group_count"]
    inner, n_conv = n_head * SIZE, n_head * SIZE + 2 * n_group * N_STATE
    m.matrix(p + "ssm_in", inner + n_conv + n_head, N_EMBD)
    m.put(p + "ssm_conv1d.weight", 0.6 * m.normal(p + "ssm_conv1d", n_conv, m.keys["ssm.conv_kernel"]))
    m.bias(p + "ssm_conv1d", n_conv, scale=0.3)
    m.bias(p + "ssm_dt", n_head, scale=0.5)
    m.put(p + "ssm_a", -np.exp(0.7 * m.normal(p + "ssm_a", n_head, 1) - 1.5))
    m.put(p + "ssm_d", 1 + 0.3 * m.normal(p + "ssm_d", n_head, 1))
    if normed:
        m.put(p + "ssm_norm.weight", 1 + 0.3 * m.normal(p + "ssm_norm", n_group, inner // n_group))
    m.matrix(p + "ssm_out", N_EMBD, inner, gain=1.5)


def ssm(n_head: int, n_group: int) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": 4,
        "ssm.state_size": N_STATE,
        "ssm.group_count": n_group,
        "ssm.time_step_rank": n_head,
        "ssm.inner_size": n_head * SIZE,
    }


def selection(m: Fixture, il: int, *, normed: bool = False) -> None:
    p, inner, n_state = f"blk.{il}.", m.keys["ssm.inner_size"], m.keys["ssm.state_size"]
    dt_rank = m.keys["ssm.time_step_rank"]
    m.norm(f"{p}attn_norm", N_EMBD)
    m.matrix(p + "ssm_in", 2 * inner, N_EMBD)
    m.put(p + "ssm_conv1d.weight", 0.6 * m.normal(p + "ssm_conv1d", inner, m.keys["ssm.conv_kernel"]))
    m.bias(p + "ssm_conv1d", inner, scale=0.3)
    m.matrix(p + "ssm_x", dt_rank + 2 * n_state, inner, gain=1.5)
    m.matrix(p + "ssm_dt", inner, dt_rank)
    m.bias(p + "ssm_dt", inner)
    if normed:
        for name, n in ("dt", dt_rank), ("b", n_state), ("c", n_state):
            m.norm(f"{p}ssm_{name}_norm", n)
    m.put(p + "ssm_a", -np.exp(0.7 * m.normal(p + "ssm_a", inner, n_state) - 1))
    m.put(p + "ssm_d", 1 + 0.3 * m.normal(p + "ssm_d", inner))
    m.matrix(p + "ssm_out", N_EMBD, inner, gain=1.5)


SELECTIVE = {  # the sizes of Mamba-1 layers
    "ssm.conv_kernel": 4,
    "ssm.state_size": N_STATE,
    "ssm.time_step_rank": 8,
    "ssm.inner_size": 2 * N_EMBD,
}


def selective(m: Fixture, n_layer: int, **keys: Any) -> None:
    base(m, n_layer, n_head=0, n_kv=0, **SELECTIVE, **keys, feed_forward_length=0)
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"):
        del m.keys[key]
    for il in range(n_layer):
        selection(m, il)


@fixture("mamba")
def mamba(m: Fixture) -> None:
    selective(m, 4)


@fixture("mamba+norms")
def mamba_norms(m: Fixture) -> None:
    """Falcon Mamba."""
    selective(m, 3, ssm__dt_b_c_rms=True)


@fixture("jamba")
def jamba(m: Fixture) -> None:
    """Every second layer has experts, and layer 1 of the four layers has attention."""
    kv = [2 * (il % 4 == 1) for il in range(6)]
    base(m, 6, n_kv=kv, **SELECTIVE, expert_count=N_EXPERT, expert_used_count=2, feed_forward_length=N_FF_EXP)
    for il in range(6):
        if kv[il]:
            m.keys["attention.head_count_kv"] = kv[il]
            attention(m, il)
        else:
            selection(m, il, normed=True)
        mixture(m, il) if il % 2 else feed_forward(m, il)
    m.keys["attention.head_count_kv"] = kv


@fixture("mamba2")
def mamba2(m: Fixture) -> None:
    base(m, 4, n_head=0, n_kv=0, **ssm(8, 1), feed_forward_length=0)
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"):
        del m.keys[key]
    for il in range(4):
        m.norm(f"blk.{il}.attn_norm", N_EMBD)
        scan(m, il)


def normed_scan(m: Fixture, il: int) -> None:
    m.norm(f"blk.{il}.attn_norm", N_EMBD)
    scan(m, il)


@fixture("granitehybrid")
def granitehybrid(m: Fixture) -> None:
    kv = [0, 2, 0, 0, 2]
    base(
        m, 5, n_kv=kv, **GRANITE, **EXPERTS, **ssm(8, 1), feed_forward_length=N_FF_EXP,
        expert_shared_feed_forward_length=48, rope__scaling__finetuned=False,
    )  # fmt: skip
    for il in range(5):
        if kv[il]:
            m.keys["attention.head_count_kv"] = kv[il]
            attention(m, il)
        else:
            normed_scan(m, il)
        mixture(m, il)
        feed_forward(m, il, norm="", suffix="_shexp")
    m.keys["attention.head_count_kv"] = kv


@fixture("granitehybrid+dense")
def granitehybrid_dense(m: Fixture) -> None:
    kv = [0, 2, 0]
    base(m, 3, n_kv=kv, **GRANITE, **ssm(8, 1), rope__scaling__finetuned=True)
    m.put("rope_freqs.weight", llama3_factors(HEAD_DIM, 1000.0))
    for il in range(3):
        if kv[il]:
            m.keys["attention.head_count_kv"] = kv[il]
            attention(m, il)
        else:
            normed_scan(m, il)
        feed_forward(m, il)
    m.keys["attention.head_count_kv"] = kv


@fixture("falcon-h1")
def falcon_h1(m: Fixture) -> None:
    base(m, 4, **ssm(8, 2))
    for il in range(4):
        attention(m, il)
        scan(m, il, normed=False)
        feed_forward(m, il)
        m.tensors[f"blk.{il}.ffn_norm"] = m.tensors.pop(f"blk.{il}.ffn_norm.weight")


KINDS = "S", "F", "A", "F", "S"


def one_of_three(m: Fixture, n_ff: int, **keys: Any) -> list[int]:
    """Add layers of each kind. Return the numbers of the feed-forward layers, to which the caller adds
    matrices."""
    kv = [2 * (kind == "A") for kind in KINDS]
    base(
        m,
        len(KINDS),
        n_kv=kv,
        **ssm(8, 2),
        **keys,
        feed_forward_length=n_ff,
        attention__layer_norm_epsilon=1e-6,
    )
    for il, kind in enumerate(KINDS):
        if kind == "S":
            normed_scan(m, il)
        elif kind == "A":
            m.keys["attention.head_count_kv"] = kv[il]
            attention(m, il)
        else:
            m.norm(f"blk.{il}.attn_norm", N_EMBD)
    m.keys["attention.head_count_kv"] = kv
    m.keys["feed_forward_length"] = [n_ff * (kind == "F") for kind in KINDS]
    m.unsteered = tuple(il for il, kind in enumerate(KINDS) if kind != "F")
    return [il for il, kind in enumerate(KINDS) if kind == "F"]


@fixture("nemotron_h")
def nemotron_h(m: Fixture) -> None:
    for il in one_of_three(m, N_FF):
        m.matrix(f"blk.{il}.ffn_up", N_FF, N_EMBD)
        m.matrix(f"blk.{il}.ffn_down", N_EMBD, N_FF)


@fixture("nemotron_h_moe")
def nemotron_h_moe(m: Fixture) -> None:
    keys = {"expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_shared_count": 1}
    shared = 48
    for il in one_of_three(m, N_FF_EXP, **EXPERTS, **keys, expert_shared_feed_forward_length=shared):
        p = f"blk.{il}.ffn_"
        m.matrix(p + "gate_inp", N_EXPERT, N_EMBD, gain=3.0)
        selection_bias(m, il)
        m.matrix(p + "up_exps", N_EXPERT, N_FF_EXP, N_EMBD)
        m.matrix(p + "down_exps", N_EXPERT, N_EMBD, N_FF_EXP)
        m.matrix(p + "up_shexp", shared, N_EMBD)
        m.matrix(p + "down_shexp", N_EMBD, shared)
