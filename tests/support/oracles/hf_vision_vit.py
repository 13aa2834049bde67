"""Encoders whose layers differ from the usual layers: Pixtral, InternVL and Kimi."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers as tf
from oracles.fixture import N_VOCAB, Fixture
from oracles.hf_vision_parts import (
    ROWS,
    SIGLIP,
    TEXT,
    Inputs,
    complete,
    load,
    made,
    planes,
    renamed,
    sizes,
)
from oracles.vision import GRIDS, TEXT_WIDTH, lines_of, pixels_of, size

PIXTRAL = {
    "ln1": "attention_norm", "ln2": "ffn_norm", "attn_q": "attention.q_proj", "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj", "attn_out": "attention.o_proj", "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj", "ffn_down": "feed_forward.down_proj",
}  # fmt: skip


def pixtral_of(m: Fixture, class_: Any, config_class: Any, act: str, **how: Any) -> tuple[Any, Inputs]:
    """Undo the permutation of q and k, whose rotated pairs are adjacent in the file."""
    vision = tf.PixtralVisionConfig(
        **sizes(m), image_size=256, patch_size=16, head_dim=16, hidden_act=act, rope_theta=10_000.0
    )
    text = tf.MistralConfig(**TEXT, head_dim=16)
    config = config_class(text_config=text, vision_config=vision, image_token_index=0, **how)
    outer = {
        "v.patch_embd": "vision_tower.patch_conv", "v.pre_ln": "vision_tower.ln_pre",
        "mm.1": "multi_modal_projector.linear_1", "mm.2": "multi_modal_projector.linear_2",
        "mm.input_norm": "multi_modal_projector.norm",
        "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
    }  # fmt: skip
    del m.tensors["v.token_embd.img_break"]
    for name, values in m.tensors.items():
        if "attn_q" in name or "attn_k" in name:
            m.tensors[name] = values.reshape(4, 8, 2, 64).transpose(0, 2, 1, 3).reshape(64, 64)
    state = renamed(m, "vision_tower.transformer.layers", PIXTRAL, outer)
    network = load(made(class_, config), state, ("vision_tower", "multi_modal"))
    image = planes(m)
    return network, {"pixel_values": image, "image_sizes": torch.tensor([image.shape[2:]])}


@complete("pixtral")
def pixtral(m: Fixture) -> tuple[Any, Inputs]:
    how = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    return pixtral_of(m, tf.LlavaModel, tf.LlavaConfig, "gelu", **how)


@complete("pixtral+merger")
def mistral3(m: Fixture) -> tuple[Any, Inputs]:
    return pixtral_of(m, tf.Mistral3Model, tf.Mistral3Config, "silu", spatial_merge_size=2)


def with_breaks(rows: Callable[[Fixture], np.ndarray]) -> Callable[[Fixture], np.ndarray]:
    """Return a function that adds the row of [IMG_BREAK], a token in transformers, between lines of rows."""

    def joined(m: Fixture) -> np.ndarray:
        end, n_lines = m["v.token_embd.img_break"], lines_of(m)
        lines = rows(m).reshape(n_lines, -1, TEXT_WIDTH)
        ends = np.broadcast_to(end, (n_lines, 1, TEXT_WIDTH))
        return np.concatenate([lines, ends], axis=1).reshape(-1, TEXT_WIDTH)[:-1]

    return joined


ROWS |= {name: with_breaks(ROWS[name]) for name in ("pixtral", "pixtral+merger")}


INTERNVL = {
    "ln1": "layernorm_before", "ln2": "layernorm_after", "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj", "attn_v": "attention.v_proj", "attn_out": "attention.projection_layer",
    "attn_q_norm": "attention.q_norm", "attn_k_norm": "attention.k_norm",
    "ls1": "lambda_1", "ls2": "lambda_2",
    "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
}  # fmt: skip


def internvl_of(m: Fixture, **how: Any) -> tuple[Any, Inputs]:
    vision = {**sizes(m), "image_size": 64, "patch_size": 16, "attention_bias": True, **how}
    config = tf.InternVLConfig(
        vision_config={"model_type": "internvl_vision", **vision},
        text_config={"model_type": "llama", **TEXT},
        image_token_id=0,
    )
    outer = {
        "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
        "mm.model.mlp.0": "multi_modal_projector.layer_norm",
        "mm.model.mlp.1": "multi_modal_projector.linear_1",
        "mm.model.mlp.3": "multi_modal_projector.linear_2",
    }  # fmt: skip
    token, table = m.tensors.pop("v.class_embd"), m.tensors.pop("v.position_embd.weight")
    state = renamed(m, "vision_tower.encoder.layer", INTERNVL, outer)
    state = {
        name.replace("lambda_1.weight", "lambda_1").replace("lambda_2.weight", "lambda_2"): x
        for name, x in state.items()
    }
    state["vision_tower.embeddings.cls_token"] = token.reshape(1, 1, -1)
    state["vision_tower.embeddings.position_embeddings"] = table.reshape(1, 17, -1)
    network = load(made(tf.InternVLModel, config), state, ("vision_tower", "multi_modal"))
    return network, {"pixel_values": planes(m)}


@complete("internvl")
def internvl(m: Fixture) -> tuple[Any, Inputs]:
    return internvl_of(m)


@complete("internvl+rms")
def internvl_rms(m: Fixture) -> tuple[Any, Inputs]:
    return internvl_of(m, norm_type="rms_norm", use_qk_norm=True)


KIMI = SIGLIP | {"ln1": "norm1", "ln2": "norm2"} | {f"attn_{x}": f"attn.{x}_proj" for x in "qkv"}
KIMI |= {"attn_out": "attn.proj"}


def kimi_of(m: Fixture, permuted: bool) -> tuple[Any, Inputs]:
    """transformers has Kimi K2.5, which encodes a still image with Kimi-VL's encoder. In transformers, RoPE
    is half-split. RoPE pairs of columns and of lines alternate, except in files with `permuted` rows of q and
    k."""
    vision = {**sizes(m), "patch_size": 14, "pos_emb_height": 8, "pos_emb_width": 8}
    text = {"model_type": "deepseek_v3", **TEXT, "num_key_value_heads": 4}
    ids = {"image_token_id": 0, "video_token_id": N_VOCAB - 1}
    config = tf.Kimi_K25Config(text_config=text, vision_config=vision, projection_hidden_size=64, **ids)
    for il in range(size(m, "block_count")):
        for kind in ("weight", "bias"):
            if (qkv := m.tensors.pop(f"v.blk.{il}.attn_qkv.{kind}", None)) is not None:
                for x, part in zip("qkv", np.split(qkv, 3), strict=True):
                    m.put(f"v.blk.{il}.attn_{x}.{kind}", part)
            for x in "qk":
                name = f"v.blk.{il}.attn_{x}.{kind}"
                heads = m.tensors[name].reshape(4, *((2, 4) if permuted else (4, 2)), 2, -1)
                pairs = heads.swapaxes(1, 2) if permuted else heads
                halves = pairs.reshape(4, 8, 2, -1).swapaxes(1, 2)
                m.tensors[name] = halves.reshape(m.tensors[name].shape)
    outer = {
        "v.patch_embd": "vision_tower.patch_embed.proj", "v.post_ln": "vision_tower.final_layernorm",
        "mm.input_norm": "mm_projector.pre_norm", "mm.1": "mm_projector.in_proj",
        "mm.2": "mm_projector.out_proj",
    }  # fmt: skip
    table = m.tensors.pop("v.position_embd.weight").reshape(8, 8, 64)
    state = renamed(m, "vision_tower.layers", KIMI, outer)
    state["vision_tower.patch_embed.pos_emb.position_embeddings"] = table
    network = load(made(tf.Kimi_K25Model, config), state, ("vision_tower", "mm_projector"))
    (height, width), p = GRIDS[m.name], 14
    cut = pixels_of(m.name, p).reshape(height, p, width, p, 3).transpose(0, 2, 4, 1, 3)
    patches = torch.from_numpy(np.ascontiguousarray(cut.reshape(height * width, 3, p, p)))
    return network, {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, height, width]])}


@complete("kimivl")
def kimivl(m: Fixture) -> tuple[Any, Inputs]:
    return kimi_of(m, permuted=False)


@complete("kimik25")
def kimik25(m: Fixture) -> tuple[Any, Inputs]:
    return kimi_of(m, permuted=True)
