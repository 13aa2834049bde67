"""Fixtures without experts whose layers differ in their parts or windows."""

from __future__ import annotations

import numpy as np
from oracles.dense import llama3_factors
from oracles.fixture import Fixture
from oracles.parts import HEAD_DIM, N_EMBD, N_FF, attention, base, feed_forward, fixture


@fixture("deci")
def deci(m: Fixture) -> None:
    """Build six different layers. Three have attention with 2, 1 and 4 kv heads, one has a matrix in place of
    attention, one has only an FFN, and one has neither attention nor FFN."""
    heads, n_kv, widths = [4, 4, 0, 4, 0, 4], [2, 0, 0, 1, 0, 4], [N_FF, N_FF, 64, N_FF, 0, 32]
    base(m, 6)
    m.unsteered = (4,)
    m.put("rope_freqs.weight", llama3_factors(HEAD_DIM, 1000.0))
    for il in range(6):
        p = f"blk.{il}."
        m.keys |= {"attention.head_count_kv": n_kv[il], "feed_forward_length": widths[il]}
        if n_kv[il]:
            attention(m, il)
        elif heads[il]:
            m.norm(p + "attn_norm", N_EMBD)
            m.matrix(p + "attn_output", N_EMBD, N_EMBD)
        if widths[il]:
            feed_forward(m, il)
    m.keys |= {
        "attention.head_count": heads,
        "attention.head_count_kv": n_kv,
        "feed_forward_length": widths,
    }


@fixture("muse-glimmer")
def muse_glimmer(m: Fixture) -> None:
    local = [True, True, True, False, True]
    base(
        m, 5, attention__sliding_window=12, attention__sliding_window_pattern=local, logit_scale=0.5,
        final_logit_softcapping=2.0,
    )  # fmt: skip
    for il in range(5):
        p = f"blk.{il}."
        attention(m, il)
        m.put(p + "attn_q_norm.weight", np.full(HEAD_DIM, 3.0))
        m.put(p + "attn_k_norm.weight", np.ones(HEAD_DIM))
        m.matrix(p + "attn_gate", 4 * HEAD_DIM, N_EMBD, gain=2.0)
        feed_forward(m, il)
        for name in ("post_attention_norm", "post_ffw_norm"):
            m.norm(p + name, N_EMBD)
    m.unread = tuple(f"blk.{il}.attn_k_norm" for il in range(5))
