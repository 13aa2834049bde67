"""Tiny random projectors (mmproj), one per family, and the pictures that they encode."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import numpy as np
from oracles.fixture import Fixture

BUILDERS: dict[str, Callable[[Fixture], None]] = {}
GRIDS: dict[str, tuple[int, int]] = {}  # (height, width) of each fixture's picture, in patches
TEXT_WIDTH = 64  # width of the embeddings of the text models in fixtures.py


def builder(
    name: str, grid: tuple[int, int]
) -> Callable[[Callable[[Fixture], None]], Callable[[Fixture], None]]:
    def add(build: Callable[[Fixture], None]) -> Callable[[Fixture], None]:
        BUILDERS[name], GRIDS[name] = build, grid
        return build

    return add


def build(name: str) -> Fixture:
    fixture = Fixture(name, "clip")
    BUILDERS[name](fixture)
    return fixture


def pixels_of(name: str, patch: int) -> np.ndarray:
    """Return the normalized pixels of a fixture's picture, f32 [height, width, 3] in -1..1."""
    height, width = (patch * n for n in GRIDS[name])
    rng = np.random.default_rng(crc32(f"picture {name}".encode()))
    return (rng.integers(0, 256, (height, width, 3)).astype(np.float32) / 255 - 0.5) / np.float32(0.5)


def lines_of(m: Fixture) -> int:
    """Return the number of lines of rows that a Pixtral encoder produces."""
    return GRIDS[m.name][0] // m.keys.get("vision.spatial_merge_size", 1)


def keys(
    m: Fixture,
    projector: str,
    *,
    n_layer: int = 3,
    n_embd: int = 64,
    n_head: int = 4,
    n_ff: int = 88,
    image: int = 64,
    patch: int = 16,
    eps: float = 1e-6,
) -> None:
    m.keys |= {
        "general.type": "mmproj",
        "projector_type": projector,
        "has_vision_encoder": True,
        "vision.embedding_length": n_embd,
        "vision.feed_forward_length": n_ff,
        "vision.block_count": n_layer,
        "vision.attention.head_count": n_head,
        "vision.attention.layer_norm_epsilon": eps,
        "vision.projection_dim": TEXT_WIDTH,
        "vision.image_size": image,
        "vision.patch_size": patch,
        "vision.image_mean": [0.5, 0.5, 0.5],
        "vision.image_std": [0.5, 0.5, 0.5],
    }


def size(m: Fixture, name: str) -> int:
    return int(m.keys[f"vision.{name}"])


def layer_norm(m: Fixture, name: str, n: int) -> None:
    m.norm(name, n)
    m.bias(name, n, scale=0.2)


def patches(m: Fixture, bias: bool = True, name: str = "v.patch_embd.weight") -> None:
    d, p = size(m, "embedding_length"), size(m, "patch_size")
    m.put(name, m.normal(name, d, 3, p, p) / np.float32(p * 3**0.5))
    if bias:
        m.bias("v.patch_embd", d)


def layers(
    m: Fixture,
    *,
    norm: Callable[[Fixture, str, int], None] = layer_norm,
    bias: bool = True,
    gated: bool = False,
) -> None:
    d, ff = size(m, "embedding_length"), size(m, "feed_forward_length")
    for il in range(size(m, "block_count")):
        at = f"v.blk.{il}."
        norm(m, at + "ln1", d)
        norm(m, at + "ln2", d)
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            m.matrix(at + name, d, d, bias=bias)
        if gated:
            m.matrix(at + "ffn_gate", ff, d, bias=bias)
        m.matrix(at + "ffn_up", ff, d, bias=bias)
        m.matrix(at + "ffn_down", d, ff, bias=bias)


@builder("idefics3", (6, 6))
def idefics3(m: Fixture) -> None:
    keys(m, "idefics3", image=96)
    m.keys |= {"use_gelu": True, "vision.projector.scale_factor": 3}
    patches(m)
    m.put("v.position_embd.weight", m.normal("v.position_embd.weight", 36, 64))
    layers(m)
    layer_norm(m, "v.post_ln", 64)
    m.matrix("mm.model.fc", TEXT_WIDTH, 9 * 64)


def qwen(m: Fixture, projector: str, patch: int, **how: int) -> None:
    keys(m, projector, patch=patch, **how)
    m.keys["vision.spatial_merge_size"] = 2
    patches(m)
    patches(m, bias=False, name="v.patch_embd.weight.1")
    d = size(m, "embedding_length")
    m.matrix("mm.0", 4 * d, 4 * d, bias=True)
    m.matrix("mm.2", TEXT_WIDTH, 4 * d, bias=True)


def fuse_qkv(m: Fixture) -> None:
    for il in range(size(m, "block_count")):
        at = f"v.blk.{il}."
        for kind in ("weight", "bias"):
            if f"{at}attn_q.{kind}" in m.tensors:
                parts = [m.tensors.pop(f"{at}attn_{x}.{kind}") for x in "qkv"]
                m.put(f"{at}attn_qkv.{kind}", np.concatenate(parts))


@builder("qwen3vl", (6, 10))
def qwen3vl(m: Fixture) -> None:
    qwen(m, "qwen3vl_merger", 16, n_layer=4, image=128)
    m.keys |= {"use_gelu": True, "vision.is_deepstack_layers": [True, False, True, False]}
    m.put("v.position_embd.weight", m.normal("v.position_embd.weight", 64, 64))
    layers(m)
    fuse_qkv(m)
    layer_norm(m, "v.post_ln", 64)
    for il in (0, 2):
        layer_norm(m, f"v.deepstack.{il}.norm", 256)
        m.matrix(f"v.deepstack.{il}.fc1", 256, 256, bias=True)
        m.matrix(f"v.deepstack.{il}.fc2", TEXT_WIDTH, 256, bias=True)


@builder("gemma3", (8, 8))
def gemma3(m: Fixture) -> None:
    keys(m, "gemma3", image=112, patch=14)
    m.keys["use_gelu"] = True
    patches(m)
    m.put("v.position_embd.weight", m.normal("v.position_embd.weight", 64, 64))
    layers(m)
    layer_norm(m, "v.post_ln", 64)
    m.norm("mm.soft_emb_norm", 64)
    m.matrix("mm.input_projection", 64, TEXT_WIDTH)


@builder("qwen2.5vl", (18, 12))
def qwen25vl(m: Fixture) -> None:
    """The picture is 2.25 windows of 8 x 8 patches high and 1.5 windows wide."""
    qwen(m, "qwen2.5vl_merger", 14, n_layer=4)
    m.keys |= {"use_silu": True, "vision.n_wa_pattern": 2}
    m.tensors.pop("v.patch_embd.bias")
    layers(m, norm=Fixture.norm, gated=True)
    m.norm("v.post_ln", 64)


@builder("qwen2vl", (4, 6))
def qwen2vl(m: Fixture) -> None:
    qwen(m, "qwen2vl_merger", 14, n_ff=128)
    m.tensors.pop("v.patch_embd.bias")
    layers(m)
    layer_norm(m, "v.post_ln", 64)


def pixtral_of(m: Fixture, merge: int) -> None:
    keys(m, "pixtral", image=256, eps=1e-5)
    patches(m, bias=False)
    m.norm("v.pre_ln", 64)
    layers(m, norm=Fixture.norm, bias=False, gated=True)
    m.put("v.token_embd.img_break", m.normal("v.token_embd.img_break", TEXT_WIDTH))
    m.matrix("mm.1", TEXT_WIDTH, 64, bias=merge == 1)
    m.matrix("mm.2", TEXT_WIDTH, TEXT_WIDTH, bias=merge == 1)


@builder("pixtral", (3, 5))
def pixtral(m: Fixture) -> None:
    pixtral_of(m, 1)
    m.keys["use_gelu"] = True


@builder("pixtral+merger", (6, 4))
def mistral3(m: Fixture) -> None:
    pixtral_of(m, 2)
    m.keys |= {"use_silu": True, "vision.spatial_merge_size": 2}
    m.norm("mm.input_norm", 64)
    m.matrix("mm.patch_merger", 64, 256)


def gemma4_of(m: Fixture, projector: str, **how: int) -> None:
    keys(m, projector, **how)
    m.keys["vision.projector_type"] = m.keys.pop("projector_type")
    m.keys["vision.projector.scale_factor"] = 3
    m.keys |= {"vision.image_mean": [0.0] * 3, "vision.image_std": [1.0] * 3}
    m.matrix("mm.input_projection", TEXT_WIDTH, 64)


@builder("gemma4v", (6, 9))
def gemma4v(m: Fixture) -> None:
    """Products are clipped as in the E models, and results are standardized."""
    gemma4_of(m, "gemma4v")
    patches(m, bias=False)
    m.put("v.position_embd.weight", m.normal("v.position_embd.weight", 2, 12, 64))
    layers(m, norm=Fixture.norm, bias=False, gated=True)
    for il in range(3):
        at = f"v.blk.{il}."
        for name, n in (
            ("attn_q_norm", 16),
            ("attn_k_norm", 16),
            ("attn_post_norm", 64),
            ("ffn_post_norm", 64),
        ):
            m.norm(at + name, n)
        for name in ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down"):
            for clip, limit in (
                ("input_min", -1.5),
                ("input_max", 1.25),
                ("output_min", -2.0),
                ("output_max", 1.75),
            ):
                m.put(f"{at}{name}.{clip}", np.array([limit], np.float32))
    m.put("v.std_bias", m.normal("v.std_bias", 64))
    m.put("v.std_scale", 1 + 0.3 * m.normal("v.std_scale", 64))


@builder("gemma4uv", (2, 3))
def gemma4uv(m: Fixture) -> None:
    """This family has no encoder. The grid is in squares of 3 x 3 patches. With these means, libmtmd reads
    the pixels of pixels_of()."""
    gemma4_of(m, "gemma4uv", patch=4, n_layer=0, n_head=0, n_ff=0)
    m.keys |= {"vision.image_mean": [0.5] * 3, "vision.image_std": [0.5] * 3}
    m.put("v.patch_embd.weight", m.normal("v.patch_embd.weight", 64, 432) / np.float32(12 * 3**0.5))
    m.bias("v.patch_embd", 64)
    for i, n in ((1, 432), (2, 64), (3, 64)):
        layer_norm(m, f"v.patch_norm.{i}", n)
    m.put("v.position_embd.weight", m.normal("v.position_embd.weight", 2, 12, 64))


@builder("lfm2", (6, 10))
def lfm2(m: Fixture) -> None:
    keys(m, "lfm2", image=256)
    m.keys |= {"use_gelu": True, "vision.projector.scale_factor": 2}
    patches(m)
    m.put("v.position_embd.weight", m.normal("v.position_embd.weight", 64, 64))
    layers(m)
    layer_norm(m, "v.post_ln", 64)
    layer_norm(m, "mm.input_norm", 256)
    m.matrix("mm.1", 80, 256, bias=True)
    m.matrix("mm.2", TEXT_WIDTH, 80, bias=True)


def internvl_of(m: Fixture) -> None:
    keys(m, "internvl")
    m.keys |= {"use_gelu": True, "vision.projector.scale_factor": 2}
    patches(m)
    m.put("v.class_embd", m.normal("v.class_embd", 1, 1, 64))
    m.put("v.position_embd.weight", m.normal("v.position_embd.weight", 1, 17, 64))
    layer_norm(m, "mm.model.mlp.0", 256)
    m.matrix("mm.model.mlp.1", TEXT_WIDTH, 256, bias=True)
    m.matrix("mm.model.mlp.3", TEXT_WIDTH, TEXT_WIDTH, bias=True)
    for il in range(3):
        for name in ("ls1", "ls2"):
            m.norm(f"v.blk.{il}.{name}", 64)


@builder("internvl", (4, 4))
def internvl(m: Fixture) -> None:
    internvl_of(m)
    layers(m)


@builder("internvl+rms", (4, 4))
def internvl_rms(m: Fixture) -> None:
    """Like the encoder of 6 B weights, this one has RMS norms, also of q and k."""
    internvl_of(m)
    layers(m, norm=Fixture.norm)
    for il in range(3):
        m.norm(f"v.blk.{il}.attn_q_norm", 64)
        m.norm(f"v.blk.{il}.attn_k_norm", 64)


@builder("llava", (4, 4))
def llava(m: Fixture) -> None:
    """The file is as LLaVA's converter writes it: ffn_up and ffn_down are swapped, and projection_dim is
    CLIP's."""
    keys(m, "mlp", eps=1e-5)
    m.keys |= {"vision.projection_dim": 80, "vision.feature_layer": [3], "use_gelu": False}
    patches(m, bias=False)
    m.put("v.class_embd", m.normal("v.class_embd", 64))
    m.put("v.position_embd.weight", m.normal("v.position_embd.weight", 17, 64))
    layer_norm(m, "v.pre_ln", 64)
    layers(m)
    for il in range(3):
        for kind in ("weight", "bias"):
            up, down = (f"v.blk.{il}.ffn_{name}.{kind}" for name in ("up", "down"))
            m.tensors[up], m.tensors[down] = m.tensors[down], m.tensors[up]
    m.matrix("mm.0", TEXT_WIDTH, 64, bias=True)
    m.matrix("mm.2", TEXT_WIDTH, TEXT_WIDTH, bias=True)


@builder("minicpmv", (8, 8))
def minicpmv(m: Fixture) -> None:
    """The file is as MiniCPM-V's converter writes it. A head of the resampler has 128 values, and so have the
    text model's embeddings."""
    keys(m, "resampler", image=448, patch=56, n_ff=88)
    m.keys |= {"use_gelu": True, "vision.projection_dim": 0, "minicpmv_version": 3, "minicpmv_query_num": 8}
    patches(m)
    m.put("v.position_embd.weight", m.normal("v.position_embd.weight", 4900, 64))
    layers(m)
    layer_norm(m, "v.post_ln", 64)
    at = "resampler."
    m.put(at + "query", m.normal(at + "query", 8, 128))
    m.put(at + "pos_embed_k", np.zeros((4900, 128), np.float32))
    m.matrix(at + "kv", 128, 64)
    m.matrix(at + "proj", 128, 128)
    for name in ("attn.q", "attn.k", "attn.v", "attn.out"):
        m.matrix(at + name, 128, 128, bias=True)
    for name in ("ln_q", "ln_kv", "ln_post"):
        layer_norm(m, at + name, 128)


@builder("llama4", (4, 4))
def llama4(m: Fixture) -> None:
    """The file is as Llama 4's converter writes it: the weight of the patches is a matrix."""
    keys(m, "llama4", n_ff=256, eps=1e-5)
    m.keys |= {"use_gelu": True, "vision.projector.scale_factor": 2}
    m.matrix("v.patch_embd", 64, 768)
    m.put("v.class_embd", m.normal("v.class_embd", 64))
    m.put("v.position_embd.weight", m.normal("v.position_embd.weight", 17, 64))
    layers(m)
    for name in ("v.pre_ln", "v.post_ln"):
        layer_norm(m, name, 64)
    m.matrix("mm.model.mlp.1", 96, 256)
    m.matrix("mm.model.mlp.2", 96, 96)
    m.matrix("mm.model.fc", TEXT_WIDTH, 96)


@builder("glm4v", (6, 10))
def glm4v(m: Fixture) -> None:
    """The file is as GLM's converter writes it: feed_forward_length is the projector's, and the encoder's FFN
    has the width TEXT_WIDTH."""
    qwen(m, "glm4v", 14, n_ff=TEXT_WIDTH, image=112)
    for name in ("mm.0", "mm.2"):
        del m.tensors[f"{name}.weight"], m.tensors[f"{name}.bias"]
    m.put("v.position_embd.weight", m.normal("v.position_embd.weight", 64, 64))
    layers(m, norm=Fixture.norm, bias=False, gated=True)
    fuse_qkv(m)
    for name in ("v.norm_embd", "v.post_ln"):
        m.norm(name, 64)
    merger = "mm.patch_merger.weight"
    m.put(merger, m.normal(merger, TEXT_WIDTH, 64, 2, 2) / np.float32(16))
    m.bias("mm.patch_merger", TEXT_WIDTH)
    m.matrix("mm.model.fc", TEXT_WIDTH, TEXT_WIDTH)
    layer_norm(m, "mm.post_norm", TEXT_WIDTH)
    m.matrix("mm.gate", 80, TEXT_WIDTH)
    m.matrix("mm.up", 80, TEXT_WIDTH)
    m.matrix("mm.down", TEXT_WIDTH, 80)
    m.keys |= {"use_silu": True, "vision.feed_forward_length": 80}


def kimi_of(m: Fixture, projector: str) -> None:
    keys(m, projector, image=112, patch=14, eps=1e-5)
    m.keys |= {"use_gelu": True, "vision.projector.scale_factor": 2}
    patches(m)
    layers(m)
    layer_norm(m, "v.post_ln", 64)
    layer_norm(m, "mm.input_norm", 64)
    m.matrix("mm.1", 256, 256, bias=True)
    m.matrix("mm.2", TEXT_WIDTH, 256, bias=True)


@builder("kimivl", (4, 10))
def kimivl(m: Fixture) -> None:
    kimi_of(m, "kimivl")
    m.put("v.position_embd.weight", m.normal("v.position_embd.weight", 64, 64))


@builder("kimik25", (10, 4))
def kimik25(m: Fixture) -> None:
    kimi_of(m, "kimik25")
    m.keys |= {"vision.image_min_pixels": 8 * 196, "vision.image_max_pixels": 16_384 * 196}
    m.put("v.position_embd.weight", m.normal("v.position_embd.weight", 8, 8, 64))
    fuse_qkv(m)
