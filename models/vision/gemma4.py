"""gemma4v (Gemma 4 E2B, E4B, 26B-A4B, 31B): RMS norms around attention and FFN, and norms of q, k and v. RoPE
rotates half of a head by the column, half by the line. The mean of a square of patches becomes a row.
"""

from __future__ import annotations

import math

import numpy as np

from vkbackend.errors import GGUFError
from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor, Weight
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.vision.encoder import ROPE, Encoder, read_matrix
from vkbackend.models.vision.patches import axial_rope, patch_positions
from vkbackend.models.vision.picture import Tile

ROPE_BASE = 100.0
CLIPS = ("input_min", "input_max", "output_min", "output_max")
STD_BIAS, STD_SCALE = "v.std_bias", "v.std_scale"
MAX_F32 = float(np.finfo(np.float32).max)


class Model(Encoder):
    """The files of the E models (E2B, E4B) clip the inputs and outputs of products."""

    text_architectures = ("gemma4",)
    marks = ("<|image>", "<image|>")
    gated = True
    scale = 1.0

    def __init__(self, gguf: GGUF) -> None:
        super().__init__(gguf)
        self._clips = read_clips(gguf)
        self._std_bias = -read_matrix(gguf, STD_BIAS)[0] if STD_BIAS in gguf.tensors else None

    def check(self) -> None:
        self.check_tables()

    def check_tables(self) -> None:
        """Raise GGUFError unless the file has a table of columns and a table of lines."""
        shape = self._shapes.get("v.position_embd.weight", ())
        if len(shape) != 3 or shape[0] != 2 or shape[2] != self.config.n_embd:
            raise GGUFError(f"{self._path}: the tables of positions have shape {shape}")

    def sees_both_ways(self, text: GGUF | None) -> bool:
        """Models with embeddings per layer (E2B, E4B) attend only to earlier rows."""
        return text is not None and not text.u32("gemma4.embedding_length_per_layer_input", 0)

    def most_patches(self, max_tokens: int) -> int:
        return max_tokens * self.n_merged

    def position_rows(self, grid: tuple[int, int]) -> np.ndarray:
        assert self.positions is not None
        columns, lines = np.split(self.positions, 2)
        if max(grid) > len(lines):
            raise GGUFError(f"{self._path}: {len(lines)} positions do not suffice for {grid[0]} x {grid[1]}")
        at = patch_positions(grid, self.merge)
        rows: np.ndarray = columns[at[:, 1]] + lines[at[:, 0]]
        return rows

    def table_widths(self) -> dict[str, int]:
        return super().table_widths() | {ROPE: self.config.head_dim}

    def tables(self, tile: Tile) -> dict[str, np.ndarray]:
        at = patch_positions(tile.grid, self.merge)[:, ::-1]
        return super().tables(tile) | {ROPE: axial_rope(at, self.config.head_dim, ROPE_BASE)}

    # ---- weights ----

    def unread(self) -> set[str]:
        clips = {name for name in self._shapes if name.rpartition(".")[2] in CLIPS}
        return super().unread() | clips | ({STD_BIAS} & self._shapes.keys())

    def layer_weights(self, il: int) -> list[WeightSpec]:
        c = self.config
        norms = [WeightSpec(name, (c.head_dim,)) for name in ("attn_q_norm", "attn_k_norm")]
        norms += [WeightSpec(name, (c.n_embd,)) for name in ("attn_post_norm", "ffn_post_norm")]
        return [*super().layer_weights(il), *norms]

    def projector_weights(self) -> list[WeightSpec]:
        c = self.config
        specs = [WeightSpec("mm.input_projection.weight", (c.projection_dim, c.n_embd))]
        if self._std_bias is not None:
            specs.append(WeightSpec(STD_BIAS, (c.n_embd,), values=self._std_bias))
            specs.append(WeightSpec(STD_SCALE, (c.n_embd,)))
        return specs

    # ---- graph ----

    def block(self, h: Tensor, w: Weights, cells: Weight, il: int) -> Tensor:
        a = self.attention(self.norm(h, w, "ln1"), w, cells, il)
        h = h + self.norm(a, w, "attn_post_norm")
        return h + self.norm(self.feed_forward(self.norm(h, w, "ln2"), w), w, "ffn_post_norm")

    def linear(self, x: Tensor, w: Weights, name: str) -> Tensor:
        if (clips := self._clips.get(w(name).name)) is None:
            return super().linear(x, w, name)
        y = super().linear(ops.clamp(x, *clips[:2]), w, name)
        return ops.clamp(y, *clips[2:])

    def rotate(self, x: Tensor, w: Weights, name: str) -> Tensor:
        d = self.config.head_dim
        x = ops.head_norm(x, w(f"{name}_norm"), d, self.config.eps)
        return ops.rope(x, d, ROPE, half_split=True, parts=2)

    def values(self, v: Tensor) -> Tensor:
        return ops.head_norm(v, None, self.config.head_dim, self.config.eps)

    def gated_product(self, gate: Tensor, up: Tensor) -> Tensor:
        return ops.gelu_mul(gate, up)  # the files do not state the activation

    def norm(self, x: Tensor, w: Weights, name: str) -> Tensor:
        return ops.rms_norm(x, w(name), self.config.eps)

    def project(self, h: Tensor, w: Weights) -> Tensor:
        n_embd = self.config.n_embd
        h = ops.scale(ops.pool_rows(h, self.n_merged), math.sqrt(n_embd))
        if self._std_bias is not None:
            h = ops.mul_vector(ops.add_vector(h, w.tensor(STD_BIAS)), w.tensor(STD_SCALE))
        h = ops.head_norm(h, None, n_embd, self.config.eps)
        return self.linear(h, w, "mm.input_projection")


def read_clips(gguf: GGUF) -> dict[str, tuple[float, ...]]:
    """Return the finite limits (CLIPS) of the inputs and outputs of products, by weight."""
    clips = dict[str, tuple[float, ...]]()
    for name in gguf.tensors:
        stem = name.removesuffix(".weight")
        if name.endswith(".weight") and f"{stem}.{CLIPS[0]}" in gguf.tensors:
            limits = [float(gguf.data(f"{stem}.{clip}").view("<f4")[0]) for clip in CLIPS]
            low, high, least, most = (float(np.clip(x, -MAX_F32, MAX_F32)) for x in limits)
            if not low <= high or not least <= most:
                raise GGUFError(f"{gguf.paths[0]}: {stem} is clipped to impossible limits {limits}")
            clips[name] = low, high, least, most
    return clips
