"""A small idefics3 encoder in PyTorch with GGUF's tensor names. PyTorch is imported on use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np

from vkbackend.tools.demo.transformer import Weights

if TYPE_CHECKING:
    import torch

MEAN = STD = 0.5


@dataclass(frozen=True, slots=True)
class VisionSizes:
    """A picture has 36 patches. A square of four patches becomes a row, so a picture has 9 rows."""

    image: int = 48
    patch: int = 8
    merge: int = 2
    n_embd: int = 96
    n_layer: int = 3
    n_head: int = 6
    n_ff: int = 192
    eps: float = 1e-6

    @property
    def n_rows(self) -> int:
        return (self.image // self.patch // self.merge) ** 2


def init_vision(sizes: VisionSizes, n_text: int, seed: int) -> Weights:
    """Return random weights by their GGUF names; matrices are [n_out, n_in]."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    d, ff, patches = sizes.n_embd, sizes.n_ff, (sizes.image // sizes.patch) ** 2
    matrices = {"v.patch_embd": (d, 3 * sizes.patch**2), "mm.model.fc": (n_text, sizes.merge**2 * d)}
    norms = ["v.post_ln"]
    for i in range(sizes.n_layer):
        blk = f"v.blk.{i}."
        norms += [f"{blk}ln1", f"{blk}ln2"]
        matrices |= {f"{blk}attn_{name}": (d, d) for name in ("q", "k", "v", "out")}
        matrices |= {f"{blk}ffn_up": (ff, d), f"{blk}ffn_down": (d, ff)}
    weights: Weights = {"v.position_embd.weight": 0.1 * torch.randn((patches, d), generator=generator)}
    for name, shape in matrices.items():
        residual = (2 * sizes.n_layer) ** -0.5 if name.endswith(("attn_out", "ffn_down")) else 1.0
        weights[f"{name}.weight"] = torch.randn(shape, generator=generator) * shape[1] ** -0.5 * residual
        if name != "mm.model.fc":
            weights[f"{name}.bias"] = torch.zeros(shape[0])
    for name in norms:
        weights |= {f"{name}.weight": torch.ones(d), f"{name}.bias": torch.zeros(d)}
    return {name: weight.requires_grad_() for name, weight in weights.items()}


def patches_of(pixels: np.ndarray, sizes: VisionSizes) -> np.ndarray:
    """Return the normalized patches f32 [batch, n_patches, 3 * patch * patch] of pixels u8 [batch, h, w, 3].
    Patches that the projector merges are consecutive."""
    n, height, width, _ = pixels.shape
    p, m = sizes.patch, sizes.merge
    squares = pixels.reshape(n, height // (p * m), m, p, width // (p * m), m, p, 3)
    ordered = squares.transpose(0, 1, 4, 2, 5, 7, 3, 6).reshape(n, -1, 3 * p * p)
    return (ordered.astype(np.float32) / 255 - MEAN) / STD


def encode(w: Weights, sizes: VisionSizes, patches: torch.Tensor) -> torch.Tensor:
    """Return the rows [batch, n_rows, n_text] of patches [batch, n_patches, 3 * patch * patch]."""
    import torch
    import torch.nn.functional as F

    batch, n, _ = patches.shape
    d, side, m = sizes.n_embd, sizes.image // sizes.patch, sizes.merge
    order = torch.arange(side * side).view(side // m, m, side // m, m).transpose(1, 2).flatten()

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (d,), w[f"{name}.weight"], w[f"{name}.bias"], sizes.eps)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.view(batch, n, sizes.n_head, -1).transpose(1, 2)

    h = linear(patches, "v.patch_embd") + w["v.position_embd.weight"][order]
    for i in range(sizes.n_layer):
        blk = f"v.blk.{i}."
        x = norm(h, f"{blk}ln1")
        q, k, v = (heads(linear(x, f"{blk}attn_{name}")) for name in "qkv")
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, n, d)
        h = h + linear(mixed, f"{blk}attn_out")
        x = F.gelu(linear(norm(h, f"{blk}ln2"), f"{blk}ffn_up"), approximate="tanh")
        h = h + linear(x, f"{blk}ffn_down")
    return linear(norm(h, "v.post_ln").view(batch, sizes.n_rows, m * m * d), "mm.model.fc")


def write_mmproj(path: Path, weights: dict[str, np.ndarray], sizes: VisionSizes, n_text: int) -> None:
    """Write a projector file as llama.cpp's converter does: matrices in F16, other tensors in F32."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_name("vkbackend vision demo")
    writer.add_description("Describes pictures of shapes; made by tools/train_vision_demo.py")
    writer.add_license("MIT")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    writer.add_string("clip.projector_type", "idefics3")
    for name, value in {
        "image_size": sizes.image, "preproc_image_size": sizes.image, "patch_size": sizes.patch,
        "embedding_length": sizes.n_embd, "feed_forward_length": sizes.n_ff, "block_count": sizes.n_layer,
        "attention.head_count": sizes.n_head, "projection_dim": n_text, "projector.scale_factor": sizes.merge,
    }.items():  # fmt: skip
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", sizes.eps)
    writer.add_array("clip.vision.image_mean", [MEAN] * 3)
    writer.add_array("clip.vision.image_std", [STD] * 3)
    for name, weight in weights.items():
        shape = (len(weight), 3, sizes.patch, sizes.patch) if name == "v.patch_embd.weight" else weight.shape
        half = weight.ndim > 1 and name != "v.position_embd.weight"
        writer.add_tensor(name, weight.reshape(shape).astype(np.float16 if half else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
