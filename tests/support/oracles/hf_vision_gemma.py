"""Encoders of Gemma 3 and 4."""

from __future__ import annotations

import numpy as np
import torch
import transformers as tf
from oracles.fixture import Fixture
from oracles.hf_vision_parts import (
    SIGLIP,
    TEXT,
    by_pixel,
    features,
    load,
    made,
    oracle,
    planes,
    raster,
    renamed,
    sizes,
)
from oracles.vision import size
from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder, Gemma4VisionModel
from transformers.models.gemma4_unified.configuration_gemma4_unified import Gemma4UnifiedVisionConfig
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedVisionEmbedder


@oracle("gemma3")
@torch.no_grad()
def gemma3(m: Fixture) -> np.ndarray:
    vision = {**sizes(m), "image_size": size(m, "image_size"), "patch_size": size(m, "patch_size")}
    vision |= {"hidden_act": "gelu_pytorch_tanh", "vision_use_head": False}
    config = tf.Gemma3Config(
        text_config={**TEXT, "head_dim": 16}, vision_config=vision, mm_tokens_per_image=4
    )
    outer = {
        "v.patch_embd": "vision_tower.embeddings.patch_embedding",
        "v.position_embd": "vision_tower.embeddings.position_embedding",
        "v.post_ln": "vision_tower.post_layernorm",
        "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    }
    projection = m.tensors.pop("mm.input_projection.weight")
    state = renamed(m, "vision_tower.encoder.layers", SIGLIP, outer)
    state["multi_modal_projector.mm_soft_emb_norm.weight"] -= 1
    state["multi_modal_projector.mm_input_projection_weight"] = projection
    network = load(made(tf.Gemma3Model, config), state, ("vision_tower", "multi_modal"))
    return features(network.get_image_features(planes(m)))


GEMMA4 = {
    "ln1": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm", "ln2": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_out": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


@oracle("gemma4v")
@torch.no_grad()
def gemma4v(m: Fixture) -> np.ndarray:
    config = Gemma4VisionConfig(
        **sizes(m), num_key_value_heads=4, head_dim=16, position_embedding_size=12, use_clipped_linears=True,
        standardize=True,
    )  # fmt: skip
    tensors = {
        name: m.tensors.pop(name) for name in ("v.std_bias", "v.std_scale", "mm.input_projection.weight")
    }
    state = {"std_bias": tensors["v.std_bias"], "std_scale": tensors["v.std_scale"]}
    state["patch_embedder.input_proj.weight"] = by_pixel(m.tensors.pop("v.patch_embd.weight"), 16)
    state["patch_embedder.position_embedding_table"] = m.tensors.pop("v.position_embd.weight")
    for name, values in renamed(m, "encoder.layers", GEMMA4, {}).items():
        linear = "_proj." in name
        name = name.replace("_proj.weight", "_proj.linear.weight")
        state[name] = values.reshape(()) if linear and not name.endswith("weight") else values
    network = load(made(Gemma4VisionModel, config), state, ("",))
    squares, at = raster(m, 16)
    rows = network(squares / 2 + 0.5, at).last_hidden_state
    embedder = Gemma4MultimodalEmbedder(config, tf.MistralConfig(**TEXT))
    projection = {"embedding_projection.weight": tensors["mm.input_projection.weight"]}
    return features(load(embedder, projection, ("",))(rows))


@oracle("gemma4uv")
@torch.no_grad()
def gemma4uv(m: Fixture) -> np.ndarray:
    vision = Gemma4UnifiedVisionConfig(patch_size=4, model_patch_size=12, mm_embed_dim=64, mm_posemb_size=12)
    vision.output_proj_dims = 64
    network = Gemma4UnifiedVisionEmbedder(vision, tf.MistralConfig(**TEXT))
    t = m.tensors
    state = {
        "patch_dense.weight": by_pixel(t["v.patch_embd.weight"], 12),
        "patch_dense.bias": t["v.patch_embd.bias"],
        "pos_embedding": t["v.position_embd.weight"].transpose(1, 0, 2),
        "multimodal_embedder.embedding_projection.weight": t["mm.input_projection.weight"],
    }  # fmt: skip
    for i, name in ((1, "patch_ln1"), (2, "patch_ln2"), (3, "pos_norm")):
        for kind in ("weight", "bias"):
            values = t[f"v.patch_norm.{i}.{kind}"]
            state[f"{name}.{kind}"] = by_pixel(values[None], 12)[0] if i == 1 else values
    return features(load(network, state, ("",))(*raster(m, 12)))
