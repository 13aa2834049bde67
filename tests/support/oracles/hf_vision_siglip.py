"""Encoders with the layers of SigLIP or CLIP."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers as tf
from oracles.fixture import Fixture
from oracles.hf_vision_parts import (
    COMPLETE,
    ROWS,
    SIGLIP,
    TEXT,
    Inputs,
    by_pixel,
    complete,
    features,
    load,
    made,
    planes,
    raster,
    renamed,
    sizes,
)
from oracles.vision import GRIDS, size


@complete("idefics3")
def idefics3(m: Fixture) -> tuple[Any, Inputs]:
    vision = {**sizes(m), "image_size": size(m, "image_size"), "patch_size": size(m, "patch_size")}
    config = tf.Idefics3Config(
        text_config={"model_type": "llama", **TEXT},
        vision_config={**vision, "hidden_act": "gelu_pytorch_tanh"},
        scale_factor=3,
        image_token_id=0,
        pad_token_id=0,
    )
    outer = {
        "v.patch_embd": "vision_model.embeddings.patch_embedding",
        "v.position_embd": "vision_model.embeddings.position_embedding",
        "v.post_ln": "vision_model.post_layernorm",
        "mm.model.fc": "connector.modality_projection.proj",
    }
    state = renamed(m, "vision_model.encoder.layers", SIGLIP, outer)
    network = load(made(tf.Idefics3Model, config), state, ("vision", "connector"))
    return network, {"pixel_values": planes(m)[None]}


@complete("lfm2")
def lfm2(m: Fixture) -> tuple[Any, Inputs]:
    vision = {**sizes(m), "patch_size": 16, "num_patches": 64, "hidden_act": "gelu_pytorch_tanh"}
    config = tf.Lfm2VlConfig(
        vision_config={"model_type": "siglip2_vision_model", "vision_use_head": False, **vision},
        text_config={"model_type": "lfm2", **TEXT}, projector_hidden_size=80, downsample_factor=2,
        projector_use_layernorm=True, image_token_id=0,
    )  # fmt: skip
    outer = {
        "v.patch_embd": "vision_tower.embeddings.patch_embedding",
        "v.position_embd": "vision_tower.embeddings.position_embedding",
        "v.post_ln": "vision_tower.post_layernorm", "mm.input_norm": "multi_modal_projector.layer_norm",
        "mm.1": "multi_modal_projector.linear_1", "mm.2": "multi_modal_projector.linear_2",
    }  # fmt: skip
    m.tensors["v.patch_embd.weight"] = by_pixel(m.tensors["v.patch_embd.weight"], 16)
    state = renamed(m, "vision_tower.encoder.layers", SIGLIP, outer)
    network = load(made(tf.Lfm2VlModel, config), state, ("vision_tower", "multi_modal"))
    squares, _ = raster(m, 16)
    shapes, mask = torch.tensor([GRIDS[m.name]]), torch.ones(squares.shape[:2], dtype=torch.int64)
    return network, {"pixel_values": squares, "spatial_shapes": shapes, "pixel_attention_mask": mask}


@complete("llava")
def llava(m: Fixture) -> tuple[Any, Inputs]:
    """The file has 3 of 4 layers, and the names of the FFN's matrices are swapped."""
    vision = {**sizes(m), "image_size": 64, "patch_size": 16, "hidden_act": "quick_gelu"}
    vision |= {"num_hidden_layers": size(m, "block_count") + 1, "layer_norm_eps": 1e-5}
    parts = {"vision_config": tf.CLIPVisionConfig(**vision), "text_config": tf.LlamaConfig(**TEXT)}
    config = tf.LlavaConfig(**parts, image_token_index=0, vision_feature_layer=-2)
    names = SIGLIP | {"ffn_up": "mlp.fc2", "ffn_down": "mlp.fc1"}
    outer = {
        "v.patch_embd": "vision_tower.embeddings.patch_embedding",
        "v.position_embd": "vision_tower.embeddings.position_embedding",
        "v.pre_ln": "vision_tower.pre_layrnorm", "mm.0": "multi_modal_projector.linear_1",
        "mm.2": "multi_modal_projector.linear_2",
    }  # fmt: skip
    token = m.tensors.pop("v.class_embd")
    state = renamed(m, "vision_tower.encoder.layers", names, outer)
    state["vision_tower.embeddings.class_embedding"] = token
    used = "vision_tower.embeddings", "vision_tower.pre", "multi_modal"
    used += tuple(f"vision_tower.encoder.layers.{il}." for il in range(3))
    network = load(made(tf.LlavaModel, config), state, used)
    return network, {"pixel_values": planes(m)}


@torch.no_grad()
def resampled(m: Fixture, image: torch.Tensor) -> np.ndarray:
    """Return MiniCPM-V's rows of an image [1, 3, height, width]. The encoder is from transformers. The
    resampler is Qwen-VL's, computed with torch's attention."""
    t = {name: torch.from_numpy(m.tensors.pop(name)) for name in [*m.tensors] if name.startswith("resampler")}
    config = tf.SiglipVisionConfig(
        **sizes(m), image_size=448, patch_size=56, hidden_act="gelu_pytorch_tanh", vision_use_head=False
    )
    (height, width), side = (n // size(m, "patch_size") for n in image.shape[2:]), 70
    at = side * np.arange(height)[:, None] // height * side + side * np.arange(width) // width
    table = "v.position_embd.weight"
    m.tensors[table] = m.tensors[table][at.reshape(-1)]
    outer = {
        "v.patch_embd": "embeddings.patch_embedding", "v.position_embd": "embeddings.position_embedding",
        "v.post_ln": "post_layernorm",
    }  # fmt: skip
    network = load(made(tf.SiglipVisionModel, config), renamed(m, "encoder.layers", SIGLIP, outer), ("",))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale, bias = (t[f"resampler.{name}.{kind}"] for kind in ("weight", "bias"))
        return torch.nn.functional.layer_norm(x, (128,), scale, bias, 1e-6)

    v = norm(network(image).last_hidden_state[0] @ t["resampler.kv.weight"].T, "ln_kv")
    omega = 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    angles = [place.reshape(-1, 1) * omega for place in (x, y)]
    places = torch.cat([wave(a) for a in angles for wave in (torch.sin, torch.cos)], 1).float()
    attention = torch.nn.MultiheadAttention(128, 1)
    state = {"out_proj.weight": t["resampler.attn.out.weight"], "out_proj.bias": t["resampler.attn.out.bias"]}
    for kind in ("weight", "bias"):
        state[f"in_proj_{kind}"] = torch.cat([t[f"resampler.attn.{name}.{kind}"] for name in "qkv"])
    attention.load_state_dict(state)
    rows = attention(norm(t["resampler.query"], "ln_q"), v + places, v)[0]
    return (norm(rows, "ln_post") @ t["resampler.proj.weight"].T).numpy()


ROWS["minicpmv"] = lambda m: resampled(m, planes(m))


LLAMA4 = SIGLIP | {
    "ln1": "input_layernorm",
    "ln2": "post_attention_layernorm",
    "attn_out": "self_attn.o_proj",
}


@complete("llama4")
def llama4(m: Fixture) -> tuple[Any, Inputs]:
    vision = {**sizes(m), "image_size": 64, "patch_size": 16, "pixel_shuffle_ratio": 0.5}
    vision |= {"projector_input_dim": 96, "projector_output_dim": 96, "vision_output_dim": 96}
    text = {**TEXT, "head_dim": 16, "intermediate_size_mlp": 64, "num_local_experts": 1}
    config = tf.Llama4Config(text_config=text, vision_config=vision, image_token_index=0)
    outer = {
        "v.patch_embd": "vision_model.patch_embedding.linear",
        "v.pre_ln": "vision_model.layernorm_pre", "v.post_ln": "vision_model.layernorm_post",
        "mm.model.mlp.1": "vision_model.vision_adapter.mlp.fc1",
        "mm.model.mlp.2": "vision_model.vision_adapter.mlp.fc2",
        "mm.model.fc": "multi_modal_projector.linear_1",
    }  # fmt: skip
    tables = {"class_embedding": "v.class_embd", "positional_embedding_vlm": "v.position_embd.weight"}
    state = {f"vision_model.{theirs}": m.tensors.pop(ours) for theirs, ours in tables.items()}
    state |= renamed(m, "vision_model.model.layers", LLAMA4, outer)
    network = load(made(tf.Llama4ForConditionalGeneration, config), state, ("vision_model", "multi_modal"))
    return network, {"pixel_values": planes(m)}


@torch.no_grad()
def llama4_rows(m: Fixture) -> np.ndarray:
    network, how = COMPLETE["llama4"](m)
    return features(network.multi_modal_projector(network.vision_model(**how).last_hidden_state))


ROWS["llama4"] = llama4_rows
