"""Fixtures with layers of Mamba-2: mamba2."""

from __future__ import annotations

from typing import Any

import numpy as np
from oracles.fixture import Fixture
from oracles.parts import N_EMBD, base, fixture

SIZE, N_STATE = 16, 16


def scan(m: Fixture, il: int, *, normed: bool = True) -> None:
    """The weights of a state space layer behind its norm."""
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


@fixture("mamba2")
def mamba2(m: Fixture) -> None:
    """All heads read one B and C, and are normed together."""
    base(m, 4, n_head=0, n_kv=0, **ssm(8, 1), feed_forward_length=0)
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"):
        del m.keys[key]
    for il in range(4):
        m.norm(f"blk.{il}.attn_norm", N_EMBD)
        scan(m, il)
