"""resampler (MiniCPM-V 2.5 to 4.5): SigLIP on tiles of any size; learned queries attend to the patches of a
tile, and each becomes a row. Yao et al. 2024, arXiv:2408.01800.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from vkbackend.errors import GGUFError
from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.vision.encoder import CELLS, Encoder, read_matrix
from vkbackend.models.vision.picture import Tile
from vkbackend.models.vision.preprocess.minicpmv import MAX_ASPECT, SIDE

QUERIES, PLACES = "queries", "places"  # tables that the host writes
HEAD_DIM = 128  # head size of the resampler, in every released model
BASE = 10_000.0  # base of the frequencies of position embeddings
# Only the host reads these. `pos_embed_k` holds the embeddings of 70 x 70 positions, which are computed here.
HOST = ("resampler.query", "resampler.ln_q", "resampler.attn.q", "resampler.pos_embed_k")


class Model(Encoder):
    """The queries do not depend on the picture, so the host computes them, including their norm and
    projection."""

    text_architectures = ("qwen2", "qwen3", "llama")
    marks = ("<image>", "</image>", "<slice>", "</slice>")

    def __init__(self, gguf: GGUF) -> None:
        super().__init__(gguf)
        parts = {name: read_matrix(gguf, name) for name in self._host_tensors() if "pos_embed" not in name}
        width, n = self.config.projection_dim, self.config.n_queries
        square = (width, width)
        shapes = {"resampler.query": (n, width), "resampler.attn.q.weight": square}
        shapes |= dict.fromkeys(
            ("resampler.ln_q.weight", "resampler.ln_q.bias", "resampler.attn.q.bias"), (1, width)
        )
        for name, shape in shapes.items():
            if name not in parts or parts[name].shape != shape:
                found = parts[name].shape if name in parts else "missing"
                raise GGUFError(f"{self._path}: {name} is {found}, expected {shape}")
        query = parts["resampler.query"].astype(np.float64)
        query = query - query.mean(axis=1, keepdims=True)
        query /= np.sqrt((query**2).mean(axis=1, keepdims=True) + self.config.eps)
        query = query * parts["resampler.ln_q.weight"] + parts["resampler.ln_q.bias"]
        query = query @ parts["resampler.attn.q.weight"].T + parts["resampler.attn.q.bias"]
        self._queries: np.ndarray = query.astype(np.float32)

    def check(self) -> None:
        self.check_square_table()
        if self.config.projection_dim % HEAD_DIM:
            raise GGUFError(
                f"{self._path}: rows of {self.config.projection_dim} values are not whole heads of {HEAD_DIM}"
            )

    # ---- sizes and tables ----

    def grid(self, tile: Tile) -> tuple[int, int]:
        return 1, self.config.n_queries

    def n_results(self, tile: Tile) -> int:
        return self.config.n_queries

    def most_patches(self, max_tokens: int) -> int:
        """Return the number of patches of a tile. The tile has about the area of a square, and its sides are
        rounded to patches."""
        patch = self.config.patch_size
        sides = SIDE * (MAX_ASPECT**0.5 + MAX_ASPECT**-0.5)
        return math.ceil((SIDE**2 + patch / 2 * sides) / patch**2) + 1

    def table_widths(self) -> dict[str, int]:
        width = self.config.projection_dim
        return super().table_widths() | {QUERIES: width, PLACES: width}

    def tables(self, tile: Tile) -> dict[str, np.ndarray]:
        queries = np.zeros((len(tile.patches), self.config.projection_dim), np.float32)
        queries[: len(self._queries)] = self._queries
        return super().tables(tile) | {QUERIES: queries, PLACES: self._places(tile.grid)}

    def position_rows(self, grid: tuple[int, int]) -> np.ndarray:
        """For each patch, return the row of the table at the same fraction of the height and the width."""
        assert self.positions is not None
        side = math.isqrt(len(self.positions))
        rows, columns = (side * np.arange(n) // n for n in grid)
        return self.positions[(rows[:, None] * side + columns).reshape(-1)]

    def _places(self, grid: tuple[int, int]) -> np.ndarray:
        """Return sines and cosines of the patches' columns, then of their rows, f32 [n_patches, width]."""
        n = self.config.projection_dim // 4
        frequencies = BASE ** (-np.arange(n) / n)
        row, column = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
        angles = (at[:, None] * frequencies for at in (column, row))
        return np.concatenate([wave(a) for a in angles for wave in (np.sin, np.cos)], 1).astype(np.float32)

    # ---- weights ----

    def _host_tensors(self) -> set[str]:
        return {name for name in self._shapes if name.startswith(HOST)}

    def unread(self) -> set[str]:
        return super().unread() | self._host_tensors()

    def projector_weights(self) -> list[WeightSpec]:
        c, width = self.config, self.config.projection_dim
        square = [("attn.k", width), ("attn.v", width), ("attn.out", width), ("proj", width)]
        specs = [
            WeightSpec(f"resampler.{name}.weight", (width, n)) for name, n in [("kv", c.n_embd), *square]
        ]
        return [*specs, *(WeightSpec(f"resampler.{name}.weight", (width,)) for name in ("ln_kv", "ln_post"))]

    # ---- graph ----

    def project(self, h: Tensor, w: Weights) -> Tensor:
        at = "resampler"
        v = self.linear(self.norm(h, w, "v.post_ln") if w.has("v.post_ln") else h, w, f"{at}.kv")
        v = self.norm(v, w, f"{at}.ln_kv")
        k = self.linear(v + ops.host_rows(h.graph, PLACES), w, f"{at}.attn.k")
        q, how = ops.host_rows(h.graph, QUERIES), dict[str, Any](head_dim=HEAD_DIM, sees_all=True, n_runs=1)
        a = ops.self_attention(q, k, self.linear(v, w, f"{at}.attn.v"), w(CELLS), **how)
        return self.linear(
            self.norm(self.linear(a, w, f"{at}.attn.out"), w, f"{at}.ln_post"), w, f"{at}.proj"
        )
