"""Computes the rows of a projector with Hugging Face `transformers`, in float32 with eager attention.

Complete models (`COMPLETE`) also have a text model, which is random here and which make_image_logits.py
replaces. The file is long, because each family's weights are renamed for its class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import transformers as tf
from oracles.fixture import N_VOCAB, Fixture
from oracles.vision import GRIDS, TEXT_WIDTH, fuse_qkv, lines_of, pixels_of, size
from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder, Gemma4VisionModel
from transformers.models.gemma4_unified.configuration_gemma4_unified import Gemma4UnifiedVisionConfig
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedVisionEmbedder
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

Inputs = dict[str, torch.Tensor]
Builder = Callable[[Fixture], tuple[Any, Inputs]]
ROWS: dict[str, Callable[[Fixture], np.ndarray]] = {}
# A model, and its arguments for the fixture's picture.
COMPLETE: dict[str, Builder] = {}
TEXT = {
    "vocab_size": N_VOCAB, "hidden_size": TEXT_WIDTH, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip

# The names of a layer's tensors in GGUF and in transformers' SigLIP.
SIGLIP = {
    "ln1": "layer_norm1", "ln2": "layer_norm2", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
}  # fmt: skip


def oracle(name: str) -> Callable[[Callable[[Fixture], np.ndarray]], Callable[[Fixture], np.ndarray]]:
    def add(rows: Callable[[Fixture], np.ndarray]) -> Callable[[Fixture], np.ndarray]:
        ROWS[name] = rows
        return rows

    return add


def complete(name: str) -> Callable[[Builder], Builder]:
    def add(build: Builder) -> Builder:
        @torch.no_grad()
        def rows(m: Fixture) -> np.ndarray:
            network, how = build(m)
            return features(network.get_image_features(**how))

        COMPLETE[name], ROWS[name] = build, rows
        return build

    return add


def sizes(m: Fixture) -> dict[str, int]:
    return {
        "hidden_size": size(m, "embedding_length"),
        "intermediate_size": size(m, "feed_forward_length"),
        "num_hidden_layers": size(m, "block_count"),
        "num_attention_heads": size(m, "attention.head_count"),
    }


def renamed(
    m: Fixture, layers: str, names: Mapping[str, str], outer: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """Return the fixture's tensors under transformers' names. `layers` is the prefix of the layers there."""
    state = {}
    for name, values in m.tensors.items():
        stem, _, kind = name.rpartition(".")
        if name.startswith("v.blk."):
            _, _, il, part = stem.split(".", 3)
            state[f"{layers}.{il}.{names[part]}.{kind}"] = values
        else:
            state[f"{outer[stem]}.{kind}"] = values
    return state


def load(network: Any, state: Mapping[str, np.ndarray], vision: tuple[str, ...]) -> Any:
    """Load the tensors. Every parameter of the modules in `vision` must be among them."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in state.items()}
    left = network.load_state_dict(tensors, strict=False)
    missing = [name for name in left.missing_keys if name.startswith(vision)]
    assert not missing and not left.unexpected_keys, (missing, left.unexpected_keys)
    return network.eval()


def planes(m: Fixture) -> torch.Tensor:
    """Return the picture as [1, 3, height, width]."""
    pixels = pixels_of(m.name, size(m, "patch_size"))
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))[None]


def made(class_: Any, config: Any) -> Any:
    config._attn_implementation = "eager"
    return class_._from_config(config, dtype=torch.float32)


def features(output: Any) -> np.ndarray:
    rows = getattr(output, "pooler_output", output)
    rows = torch.cat(list(rows)) if isinstance(rows, list | tuple) else rows
    return rows.reshape(-1, rows.shape[-1]).numpy()


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


MERGER = {
    "v.patch_embd": "patch_embed.proj", "v.post_ln": "merger.ln_q", "mm.0": "merger.mlp.0",
    "mm.2": "merger.mlp.2",
}  # fmt: skip
QWEN = {
    "ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj",
    "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2",
}  # fmt: skip


def qwen_patches(m: Fixture) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the patches as Qwen's preprocessing does, twice as frames, and the grid."""
    p, (height, width) = size(m, "patch_size"), GRIDS[m.name]
    squares = pixels_of(m.name, p).reshape(height // 2, 2, p, width // 2, 2, p, 3)
    cut = squares.transpose(0, 3, 1, 4, 6, 2, 5).reshape(height * width, 3, 1, p, p)
    return torch.from_numpy(cut.repeat(2, axis=2).reshape(len(cut), -1)), torch.tensor([[1, height, width]])


def qwen_state(m: Fixture, names: Mapping[str, str], outer: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Join the two convolutions of frames."""
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


GEMMA4 = {
    "ln1": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm", "ln2": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_out": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def raster(m: Fixture, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the squares of a picture with columns in the order (y, x, channel), and their (x, y)."""
    height, width = GRIDS[m.name]
    pixels = pixels_of(m.name, side).reshape(height, side, width, side, 3)
    squares = pixels.transpose(0, 2, 1, 3, 4).reshape(1, height * width, -1)
    at = [[(i % width, i // width) for i in range(height * width)]]
    return torch.from_numpy(np.ascontiguousarray(squares)), torch.tensor(at)


def by_pixel(matrix: np.ndarray, side: int) -> np.ndarray:
    """Return columns (channel, y, x) in the order (y, x, channel)."""
    rows = matrix.reshape(-1, 3, side, side).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(rows).reshape(*matrix.shape[:-1] if matrix.ndim < 4 else matrix.shape[:1], -1)


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
    """Return MiniCPM-V's rows of an image [1, 3, height, width]. transformers has the encoder. The resampler
    is Qwen-VL's, with torch's attention."""
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


KIMI = SIGLIP | {"ln1": "norm1", "ln2": "norm2"} | {f"attn_{x}": f"attn.{x}_proj" for x in "qkv"}
KIMI |= {"attn_out": "attn.proj"}


def kimi_of(m: Fixture, permuted: bool) -> tuple[Any, Inputs]:
    """transformers has Kimi K2.5, whose encoder of a still image is Kimi-VL's. There, RoPE is half-split. The
    pairs of columns and of lines are in turn, except in files with `permuted` rows of q and k."""
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
