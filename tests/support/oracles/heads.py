"""Fixtures with a multi-token prediction head. A fixture is a model of fixtures.py with one more block. The
block's tensors are permuted tensors of the model's layers."""

from __future__ import annotations

from copy import deepcopy
from zlib import crc32

import numpy as np
from oracles.fixture import N_VOCAB, Fixture
from oracles.fixtures import build
from oracles.parts import N_EMBD

# Fixture -> (layer with the shapes of the head's attention, layer with the shapes of its feed-forward part).
SOURCES = {
    "qwen35": (3, 3),
    "qwen35moe": (3, 3),
    "qwen3next": (1, 1),
    "glm4moe": (3, 3),
    "deepseek2": (2, 2),
    "deepseek2+heads": (1, 1),
    "deepseek32": (3, 3),
    "glm-dsa": (1, 1),
    "nemotron_h_moe": (2, 3),
    "cohere2moe": (5, 5),
    "cohere2moe+rms": (2, 2),
}
HEADS = tuple(SOURCES)
OWN_TABLES = ("qwen35moe", "glm-dsa")  # heads with separate embeddings and a separate output matrix
WITHOUT_NORM = ("qwen3next",)  # The head uses the model's output norm.


def without_head(fixture: Fixture) -> Fixture:
    m, n_layer = deepcopy(fixture), fixture.n_layer
    m.keys |= {"block_count": n_layer, "nextn_predict_layers": 0}
    m.keys |= {key: value[:n_layer] for key, value in m.keys.items() if isinstance(value, list)}
    m.tensors = {name: v for name, v in m.tensors.items() if not name.startswith(f"blk.{n_layer}.")}
    return m


def with_head(name: str) -> Fixture:
    m = without_head(build(name))
    n_layer, sources = m.n_layer, SOURCES[name]
    for source in dict.fromkeys(sources):
        for tensor in [tensor for tensor in m.tensors if tensor.startswith(f"blk.{source}.")]:
            new = tensor.replace(f"blk.{source}.", f"blk.{n_layer}.")
            if new in m.tensors:  # the norm of a separate feed-forward layer
                new = f"blk.{n_layer}.post_attention_norm.weight"
            values, rng = m.tensors[tensor], np.random.default_rng(crc32(f"{name} {new}".encode()))
            m.put(new, rng.permutation(values.reshape(-1)).reshape(values.shape))
    p = f"blk.{n_layer}.nextn."
    m.matrix(p + "eh_proj", N_EMBD, 2 * N_EMBD)
    for norm in ("enorm", "hnorm", *(["shared_head_norm"] if name not in WITHOUT_NORM else [])):
        m.norm(p + norm, N_EMBD)
    if name in OWN_TABLES:
        m.matrix(p + "embed_tokens", N_VOCAB, N_EMBD, gain=N_EMBD**0.5)
        m.matrix(p + "shared_head_head", N_VOCAB, N_EMBD)
    m.keys |= {
        key: [*v, v[sources[0]]] for key, v in m.keys.items() if isinstance(v, list) and len(v) == n_layer
    }
    m.keys |= {"block_count": n_layer + 1, "nextn_predict_layers": 1}
    m.unread = ()
    return m


def only_head(m: Fixture) -> Fixture:
    """Return a model that applies only the head's block, norm and output matrix to its embeddings. All other
    layers add zeros."""
    n_layer, p = m.n_layer, f"blk.{m.n_layer}."
    alone = without_head(m)
    for tensor, values in alone.tensors.items():
        if any(part in tensor for part in ("attn_output.", "ssm_out.", "ffn_down")):
            alone.tensors[tensor] = np.zeros_like(values)
    attention, feeds = SOURCES[m.name]
    for tensor, values in m.tensors.items():
        if tensor.startswith(p) and ".nextn." not in tensor:
            name, source = (
                tensor.removeprefix(p),
                feeds if "ffn_" in tensor or "exp_probs" in tensor else attention,
            )
            if name == "post_attention_norm.weight" and attention != feeds:
                name, source = "attn_norm.weight", feeds
            alone.tensors[f"blk.{source}.{name}"] = values
    for ours, theirs in (("shared_head_norm", "output_norm"), ("shared_head_head", "output")):
        if f"{p}nextn.{ours}.weight" in m.tensors:
            alone.tensors[f"{theirs}.weight"] = m[f"{p}nextn.{ours}.weight"]
    if m.arch == "cohere2moe":  # RoPE is as in the layers with a window, but attention is to all positions
        alone.keys["attention.sliding_window"] = m.keys["context_length"]
    assert len(alone.tensors) == len(without_head(m).tensors), n_layer
    return alone


def with_good_head(name: str, gain: float) -> Fixture:
    """Return a model whose head is often right. The layers add `gain` times their results to the residual.
    The head adds nothing to the token's embedding, so with a gain of 0 it computes the model's logits."""
    m = with_head(name)
    p = f"blk.{m.n_layer}."
    if m.arch == "nemotron_h_moe":  # The head ends with a layer norm, which equals rms_norm if the mean is 0.
        embedding = m["token_embd.weight"]
        m.tensors["token_embd.weight"] = embedding - embedding.mean(1, keepdims=True)
    for tensor, values in m.tensors.items():
        if any(part in tensor for part in ("attn_output.", "ssm_out.", "ffn_down")):
            m.tensors[tensor] = values * np.float32(0.0 if tensor.startswith(p) else gain)
    eye = np.eye(N_EMBD, dtype=np.float32)
    m.tensors[f"{p}nextn.eh_proj.weight"] = np.concatenate([eye, 0 * eye], 1)
    m.tensors[f"{p}nextn.enorm.weight"] = np.ones(N_EMBD, np.float32)
    for ours, theirs in (("shared_head_norm", "output_norm"), ("shared_head_head", "output")):
        if (tensor := f"{p}nextn.{ours}.weight") in m.tensors:
            m.tensors[tensor] = m[f"{theirs}.weight"]
    if (tensor := f"{p}nextn.embed_tokens.weight") in m.tensors:
        m.tensors[tensor] = m["token_embd.weight"]
    return m
