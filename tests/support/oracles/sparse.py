"""Fixtures whose positions attend to the keys that an indexer chooses: deepseek32, glm-dsa."""

from __future__ import annotations

from typing import Any

from oracles.fixture import Fixture
from oracles.more_decoders import deepseek2_keys, deepseek2_layers
from oracles.parts import N_EMBD, fixture

# In every row the last score of 19 that are chosen and the first that is not are at least 1e-4 of the largest
# score apart, 100 times what F32 errs. With eight heads few scores are 0.
TOP_K, N_INDEX = 19, 8
INDEX_DIM = 64  # llama.cpp turns index keys by a Hadamard matrix of 64 or more
RANK_Q = 24


def indexer(m: Fixture, il: int) -> None:
    p = f"blk.{il}.indexer."
    m.matrix(p + "attn_q_b", N_INDEX * INDEX_DIM, RANK_Q)
    m.matrix(p + "attn_k", INDEX_DIM, N_EMBD)
    m.norm(p + "k_norm", INDEX_DIM)
    m.bias(p + "k_norm", INDEX_DIM)
    m.matrix(p + "proj", N_INDEX, N_EMBD)


def sparse_keys(m: Fixture, n_layer: int, **more: Any) -> None:
    deepseek2_keys(
        m, n_layer, attention__q_lora_rank=RANK_Q, expert_gating_func=2, expert_weights_scale=2.5,
        expert_weights_norm=True, attention__indexer__head_count=N_INDEX,
        attention__indexer__key_length=INDEX_DIM, attention__indexer__top_k=TOP_K, **more,
    )  # fmt: skip


@fixture("deepseek32")
def deepseek32(m: Fixture) -> None:
    """Groups of experts and YaRN, as deepseek2; an indexer in every layer."""
    sparse_keys(
        m, 4, expert_group_count=4, expert_group_used_count=2, rope__scaling__type="yarn",
        rope__scaling__factor=4.0, rope__scaling__original_context_length=64,
        rope__scaling__yarn_log_multiplier=0.1,
    )  # fmt: skip
    deepseek2_layers(m, 4)
    for il in range(4):
        indexer(m, il)


@fixture("glm-dsa")
def glm_dsa(m: Fixture) -> None:
    """An indexer in every layer, as GLM-5."""
    sparse_keys(m, 3)
    deepseek2_layers(m, 3)
    for il in range(3):
        indexer(m, il)


@fixture("glm-dsa+shared")
def glm_dsa_shared(m: Fixture) -> None:
    """As GLM-5.2: two layers without an indexer attend to the keys that the one before them chose."""
    full = [True, True, False, False, True]
    sparse_keys(m, len(full), attention__indexer__types=full)
    deepseek2_layers(m, len(full))
    for il, has in enumerate(full):
        if has:
            indexer(m, il)
