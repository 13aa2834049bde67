"""pixtral (Pixtral, Mistral Small 3.1 and later, Ministral 3): pictures of any size with two-dimensional
RoPE. Rows of [IMG_BREAK] end all lines of a picture except the last. Agrawal et al. 2024, arXiv:2410.07073.
"""

from __future__ import annotations

import numpy as np

from vkbackend.errors import GGUFError
from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.vision.encoder import ROPE, Encoder, read_matrix
from vkbackend.models.vision.patches import patch_positions
from vkbackend.models.vision.picture import Tile

MERGER, BREAK = "mm.patch_merger.weight", "v.token_embd.img_break"
ROPE_BASE = 10_000.0


class Model(Encoder):
    text_architectures = ("llama", "mistral3", "mistral4")
    marks = ("[IMG_END]",)
    gated = True

    def __init__(self, gguf: GGUF) -> None:
        super().__init__(gguf)
        c = self.config
        if BREAK not in gguf.tensors or self._shapes[BREAK] != (c.projection_dim,):
            raise GGUFError(f"{self._path}: the file has no embedding of [IMG_BREAK] ({BREAK})")
        self._break = read_matrix(gguf, BREAK)
        self._merger: np.ndarray | None = None
        if MERGER in gguf.tensors:
            if self._shapes[MERGER] != (c.n_embd, self.n_merged * c.n_embd):
                raise GGUFError(f"{self._path}: {MERGER} has shape {self._shapes[MERGER]}")
            # The file's columns are in the order (channel, patch), as torch's `unfold` returns them.
            columns = read_matrix(gguf, MERGER).reshape(c.n_embd, c.n_embd, self.n_merged)
            self._merger = np.ascontiguousarray(columns.transpose(0, 2, 1).reshape(c.n_embd, -1))
        elif c.merge > 1:
            raise GGUFError(f"{self._path}: the tensor {MERGER!r} is missing")

    def most_patches(self, max_tokens: int) -> int:
        return max_tokens * self.n_merged

    def grid(self, tile: Tile) -> tuple[int, int]:
        height, width = (n // self.merge for n in tile.grid)
        return 1, height * width + height - 1

    def table_widths(self) -> dict[str, int]:
        return super().table_widths() | {ROPE: self.config.head_dim}

    def tables(self, tile: Tile) -> dict[str, np.ndarray]:
        """The first half of a head's pairs rotates by the line, the second half by the column. The
        frequencies are base^(-2i / d) for a head of d; lines have the even i, columns the odd i."""
        d = self.config.head_dim
        frequencies = (ROPE_BASE ** (-np.arange(d // 2) / (d // 2))).reshape(-1, 2).T
        at = patch_positions(tile.grid, self.merge)
        angles = (at[:, :, None] * frequencies).reshape(len(at), d // 2)
        rope = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
        return super().tables(tile) | {ROPE: rope}

    def unread(self) -> set[str]:
        return super().unread() | {BREAK} | ({MERGER} & self._shapes.keys())

    def projector_weights(self) -> list[WeightSpec]:
        c = self.config
        specs = [
            WeightSpec("mm.1.weight", (c.projection_dim, c.n_embd)),
            WeightSpec("mm.2.weight", (c.projection_dim, c.projection_dim)),
        ]
        if self._merger is not None:
            specs.append(WeightSpec(MERGER, self._merger.shape, values=self._merger))
        return (
            [*specs, WeightSpec("mm.input_norm.weight", (c.n_embd,))] if self._has("mm.input_norm") else specs
        )

    def rotate(self, x: Tensor, w: Weights, name: str) -> Tensor:
        return ops.rope(x, self.config.head_dim, ROPE)

    def activate(self, x: Tensor) -> Tensor:
        return ops.gelu_erf(x)  # in these files, `use_gelu` means the exact form

    def norm(self, x: Tensor, w: Weights, name: str) -> Tensor:
        return ops.rms_norm(x, w(name), self.config.eps)

    def project(self, h: Tensor, w: Weights) -> Tensor:
        if w.has("mm.input_norm"):
            h = self.norm(h, w, "mm.input_norm")
        if self._merger is not None:
            h = ops.linear(ops.joined_rows(h, self.n_merged), w.tensor(MERGER))
        return linear(ops.gelu_erf(linear(h, w, "mm.1")), w, "mm.2")

    def arranged(self, rows: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        lines = rows.reshape(grid[0] // self.merge, -1, rows.shape[1])
        ends = np.broadcast_to(self._break, (len(lines), 1, rows.shape[1]))
        return np.concatenate([lines, ends], axis=1).reshape(-1, rows.shape[1])[:-1]
