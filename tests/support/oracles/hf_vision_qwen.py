"""Encoders that fold two frames into a patch: Qwen-VL and GLM-V."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from oracles.fixture import Fixture
from oracles.hf_vision_parts import (
    features,
    load,
    made,
    oracle,
    renamed,
)
from oracles.vision import GRIDS, TEXT_WIDTH, fuse_qkv, pixels_of, size
from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel as Qwen25Vision,
)
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VisionTransformerPretrainedModel as Qwen2Vision,
)
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

MERGER = {
    "v.patch_embd": "patch_embed.proj", "v.post_ln": "merger.ln_q", "mm.0": "merger.mlp.0",
    "mm.2": "merger.mlp.2",
}  # fmt: skip
QWEN = {
    "ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj",
    "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2",
}  # fmt: skip


def qwen_patches(m: Fixture) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the patches and the grid as Qwen's preprocessing does. Each patch contains the picture twice, as
    two frames."""
    p, (height, width) = size(m, "patch_size"), GRIDS[m.name]
    squares = pixels_of(m.name, p).reshape(height // 2, 2, p, width // 2, 2, p, 3)
    cut = squares.transpose(0, 3, 1, 4, 6, 2, 5).reshape(height * width, 3, 1, p, p)
    return torch.from_numpy(cut.repeat(2, axis=2).reshape(len(cut), -1)), torch.tensor([[1, height, width]])


def qwen_state(m: Fixture, names: Mapping[str, str], outer: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Join the convolutions of the two frames."""
    second = m.tensors.pop("v.patch_embd.weight.1")
    state = renamed(m, "blocks", names, outer)
    name = "patch_embed.proj.weight"
    state[name] = np.stack([state[name], second], axis=2)
    return state


@oracle("qwen3vl")
@torch.no_grad()
def qwen3vl(m: Fixture) -> np.ndarray:
    config = Qwen3VLVisionConfig(
        depth=4, hidden_size=64, intermediate_size=size(m, "feed_forward_length"), num_heads=4,
        out_hidden_size=TEXT_WIDTH, patch_size=16,
        num_position_embeddings=64, deepstack_visual_indexes=[0, 2],
    )  # fmt: skip
    outer = {
        "v.patch_embd": "patch_embed.proj", "v.position_embd": "pos_embed", "v.post_ln": "merger.norm",
        "mm.0": "merger.linear_fc1", "mm.2": "merger.linear_fc2",
    }  # fmt: skip
    for k, il in enumerate((0, 2)):
        for ours, theirs in (("norm", "norm"), ("fc1", "linear_fc1"), ("fc2", "linear_fc2")):
            outer[f"v.deepstack.{il}.{ours}"] = f"deepstack_merger_list.{k}.{theirs}"
    network = load(made(Qwen3VLVisionModel, config), qwen_state(m, QWEN, outer), ("",))
    out = network(*qwen_patches(m))
    return np.concatenate([part.numpy() for part in (out.pooler_output, *out.deepstack_features)], axis=1)


@oracle("qwen2.5vl")
@torch.no_grad()
def qwen25vl(m: Fixture) -> np.ndarray:
    config = Qwen2_5_VLVisionConfig(
        depth=4, hidden_size=64, intermediate_size=size(m, "feed_forward_length"), num_heads=4,
        out_hidden_size=TEXT_WIDTH, patch_size=14, window_size=112, fullatt_block_indexes=[1, 3],
    )  # fmt: skip
    names = QWEN | {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    fuse_qkv(m)
    network = load(made(Qwen25Vision, config), qwen_state(m, names, MERGER), ("",))
    return features(network(*qwen_patches(m)))


@oracle("qwen2vl")
@torch.no_grad()
def qwen2vl(m: Fixture) -> np.ndarray:
    config = Qwen2VLVisionConfig(
        depth=3, embed_dim=64, hidden_size=TEXT_WIDTH, mlp_ratio=2, num_heads=4, patch_size=14
    )
    names = QWEN | {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
    fuse_qkv(m)
    network = load(made(Qwen2Vision, config), qwen_state(m, names, MERGER), ("",))
    return features(network(*qwen_patches(m)))


@oracle("glm4v")
@torch.no_grad()
def glm4v(m: Fixture) -> np.ndarray:
    config = Glm4vVisionConfig(
        depth=3, hidden_size=64, intermediate_size=80, num_heads=4, out_hidden_size=TEXT_WIDTH, patch_size=14,
        image_size=112, rms_norm_eps=1e-6, attention_bias=False,
    )  # fmt: skip
    outer = {
        "v.patch_embd": "patch_embed.proj", "v.position_embd": "embeddings.position_embedding",
        "v.norm_embd": "post_conv_layernorm", "v.post_ln": "post_layernorm",
        "mm.patch_merger": "downsample", "mm.model.fc": "merger.proj",
        "mm.post_norm": "merger.post_projection_norm", "mm.gate": "merger.gate_proj",
        "mm.up": "merger.up_proj", "mm.down": "merger.down_proj",
    }  # fmt: skip
    names = QWEN | {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    network = load(made(Glm4vVisionModel, config), qwen_state(m, names, outer), ("",))
    return features(network(*qwen_patches(m)))
