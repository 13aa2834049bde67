"""The encoder of pictures: a pre-norm transformer over patches (Dosovitskiy et al. 2020, arXiv:2010.11929).

Each family's file states its differences: hooks of the graph, and tables that the host computes per picture.
Tensor names are as in llama.cpp (clip-impl.h). A row attends to all rows of its picture, or of its window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vkbackend.errors import GGUFError
from vkbackend.formats import dequantize
from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.tensor import Tensor, Weight
from vkbackend.models.architectures.base import Model, Weights, linear
from vkbackend.models.architectures.weight_specs import Part, WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.vision.config import VisionConfig
from vkbackend.models.vision.patches import patch_order
from vkbackend.models.vision.picture import Tile
from vkbackend.step import MAX_RUNS

PATCHES, POSITIONS, ROPE = "patches", "positions", "rope"  # tables that the host writes
CELLS = "cells"  # the identity table of cells for attention
ACTIVATIONS = {"gelu": ops.gelu, "gelu_quick": ops.gelu_quick, "silu": ops.silu}
POSITION_TABLE = "v.position_embd.weight"


class Encoder:
    """A family's weights and graph. Subclasses override the attributes and hooks below."""

    text_architectures: tuple[str, ...] = ()  # text models that may use a file of this family
    marks: tuple[str, ...] = ()  # tokens of the text model around the rows of a picture
    patch_weights: tuple[str, ...] = ("v.patch_embd.weight",)  # Qwen splits a 3-D convolution into two
    gated = False  # the FFN has a gate
    both_ways = False  # rows of a picture see each other in the text model
    has_grid = False  # the text model has M-RoPE, so rows have a height and a width
    has_windows = False  # some layers attend only to windows
    n_extra = 0  # rows of the encoder after the patches
    scale: float | None = None  # the factor of q k^T, by default 1 / sqrt(head_dim)
    n_ahead = 0
    draft_head: Model | None = None
    low_rank: Sequence[WeightSpec] = ()

    def __init__(self, gguf: GGUF) -> None:
        self.config = VisionConfig.from_gguf(gguf)
        self.n_layer = self.config.n_layer
        self._path = gguf.paths[0]
        self._shapes = {name: info.shape for name, info in gguf.tensors.items()}
        self.positions = read_matrix(gguf, POSITION_TABLE) if POSITION_TABLE in gguf.tensors else None
        self.check()

    def check(self) -> None:
        """Raise an error if the file's hyper-parameters do not suit the family."""

    def check_square(self) -> None:
        """Raise GGUFError unless the squares of patches that become rows fill `image_size` exactly, and the
        file has a position for each patch."""
        c = self.config
        side = c.image_size // c.patch_size
        if c.image_size % c.patch_size or side % c.merge:
            raise GGUFError(
                f"{self._path}: squares of {c.merge} x {c.merge} patches of {c.patch_size} pixels do not "
                f"fill {c.image_size} pixels (clip.vision.image_size)"
            )
        shape = None if self.positions is None else self.positions.shape
        if shape != (side**2, c.n_embd):
            raise GGUFError(
                f"{self._path}: the table of positions has shape {shape}, expected {side**2, c.n_embd}"
            )

    def check_square_table(self) -> None:
        """Raise GGUFError unless the file has a square table of positions, because only square tables are
        interpolated."""
        if self.positions is None or round(len(self.positions) ** 0.5) ** 2 != len(self.positions):
            raise GGUFError(f"{self._path}: the file has no square table of positions ({POSITION_TABLE})")

    # ---- sizes ----

    @property
    def merge(self) -> int:
        """Return the side, in patches, of the square that becomes a row."""
        return self.config.merge

    @property
    def n_merged(self) -> int:
        """Return how many patches become a row of the result."""
        return self.merge**2

    @property
    def n_parts(self) -> int:
        """Return how many results a row has: one from the projector, and one per deepstack layer."""
        return 1 + self.config.n_deepstack

    def sees_both_ways(self, text: GGUF | None) -> bool:
        """Return whether the rows of a picture see each other in the text model `text`."""
        return self.both_ways

    def grid(self, tile: Tile) -> tuple[int, int]:
        """Return the height and width of a tile's rows."""
        height, width = tile.grid
        if self.has_grid:
            return height // self.merge, width // self.merge
        return 1, height * width // self.n_merged

    def n_results(self, tile: Tile) -> int:
        """Return how many rows of a tile the projector computes."""
        return len(tile.patches) // self.n_merged

    def most_patches(self, max_tokens: int) -> int:
        """Return the number of patches of the largest tile: a square of image_size, or `max_tokens` rows."""
        return (self.config.image_size // self.config.patch_size) ** 2

    # ---- tables that the host computes ----

    def tables(self, tile: Tile) -> dict[str, np.ndarray]:
        """Return the step's tables, f32 [n_patches, ...]."""
        tables = {PATCHES: tile.patches}
        if (positions := self.position_rows(tile.grid)) is not None:
            tables[POSITIONS] = positions
        return tables

    def table_widths(self) -> dict[str, int]:
        widths = {PATCHES: self.n_pixels}
        return widths | {POSITIONS: self.config.n_embd} if self.positions is not None else widths

    def position_rows(self, grid: tuple[int, int]) -> np.ndarray | None:
        """Return the embeddings of the patches' positions, or None. The default takes rows of the file's
        table, in the order of the patches."""
        if self.positions is None:
            return None
        return self.positions[patch_order(grid, self.merge)]

    def arranged(self, rows: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        """Return the results in the order of the text model's rows. The default returns `rows`."""
        return rows

    def windows(self, grid: tuple[int, int]) -> list[int]:
        """Return the first patch of each window."""
        return [0]

    @property
    def n_pixels(self) -> int:
        return 3 * self.config.patch_side**2

    # ---- weights ----

    def unread(self) -> set[str]:
        """Return the tensors that only the host reads."""
        sound = {name for name in self._shapes if name.startswith(("a.", "mm.a."))}
        return sound | ({POSITION_TABLE} & self._shapes.keys())

    def weights(self) -> list[WeightSpec]:
        c, p = self.config, self.config.patch_side
        matrix = c.n_embd, self.n_pixels
        specs = [
            WeightSpec(name, matrix, axes=() if self._shapes.get(name) == matrix else (c.n_embd, 3, p, p))
            for name in self.patch_weights
        ]
        specs += [
            WeightSpec(f"{name}.weight", (c.n_embd,)) for name in ("v.pre_ln", "v.post_ln") if self._has(name)
        ]
        for il in range(c.n_layer):
            specs += [replace(spec, name=f"v.blk.{il}.{spec.name}.weight") for spec in self.layer_weights(il)]
        specs = [stored for spec in [*specs, *self.projector_weights()] for stored in self._stored(spec)]
        return specs

    def layer_weights(self, il: int) -> list[WeightSpec]:
        """Return a layer's weights, named without `v.blk.N.` and `.weight`."""
        c = self.config
        specs = [
            WeightSpec("ln1", (c.n_embd,)),
            *(WeightSpec(name, (c.n_embd, c.n_embd)) for name in ("attn_q", "attn_k", "attn_v", "attn_out")),
            WeightSpec("ln2", (c.n_embd,)),
            WeightSpec("ffn_up", (c.n_ff, c.n_embd)),
            WeightSpec("ffn_down", (c.n_embd, c.n_ff)),
        ]
        return [*specs, WeightSpec("ffn_gate", (c.n_ff, c.n_embd))] if self.gated else specs

    def projector_weights(self) -> list[WeightSpec]:
        raise NotImplementedError

    def _has(self, name: str) -> bool:
        return f"{name}.weight" in self._shapes

    def _stored(self, spec: WeightSpec) -> list[WeightSpec]:
        """Return the weight as the file stores it, and its bias if the file has one. Files fuse q, k and v,
        and old files name ffn_up and ffn_down in reverse."""
        prefix, _, name = spec.name.removesuffix(".weight").rpartition(".")
        qkv = f"{prefix}.attn_qkv"
        names = "attn_q", "attn_k", "attn_v"
        if name in names and self._has(qkv):
            n = spec.shape[0]
            at = names.index(name)
            spec = replace(spec, part=Part(f"{qkv}.weight", at * n, at * n + n, 3 * n))
        if name in ("ffn_up", "ffn_down") and not self.gated and self._reversed(prefix):
            other = f"{prefix}.{'ffn_down' if name == 'ffn_up' else 'ffn_up'}.weight"
            spec = replace(spec, part=Part(other, 0, spec.shape[0], spec.shape[0]))
        tensor = spec.part.tensor if spec.part else spec.name
        bias = f"{tensor.removesuffix('.weight')}.bias"
        if not tensor.endswith(".weight") or bias not in self._shapes:
            return [spec]
        part = spec.part and replace(spec.part, tensor=bias)
        return [spec, WeightSpec(f"{spec.name.removesuffix('.weight')}.bias", spec.shape[:1], part=part)]

    def _reversed(self, prefix: str) -> bool:
        c = self.config
        return c.n_ff != c.n_embd and self._shapes.get(f"{prefix}.ffn_down.weight") == (c.n_ff, c.n_embd)

    # ---- graph ----

    def forward(self, graph: Graph, w: Weights) -> None:
        h = self.embed(graph, w)
        for il in range(self.n_layer):
            graph.check()
            with graph.scope(f"blk.{il}"):
                h = self.block(h, w.under(f"v.blk.{il}."), w(CELLS), il)
            self.after(h, w, il)
        with graph.scope("projector"):
            ops.hidden_states(self.project(h, w))

    def embed(self, graph: Graph, w: Weights) -> Tensor:
        """Return the embeddings of the patches: a product with the pixels, plus the embeddings of the
        positions."""
        patches = ops.host_rows(graph, PATCHES)
        h = self.linear(patches, w, "v.patch_embd")
        for name in self.patch_weights[1:]:
            h = h + ops.linear(patches, w.tensor(name))
        if self.positions is not None:
            h = h + ops.host_rows(graph, POSITIONS)
        return self.norm(h, w, "v.pre_ln") if w.has("v.pre_ln") else h

    def block(self, h: Tensor, w: Weights, cells: Weight, il: int) -> Tensor:
        h = h + self.attention(self.norm(h, w, "ln1"), w, cells, il)
        return h + self.feed_forward(self.norm(h, w, "ln2"), w)

    def attention(self, x: Tensor, w: Weights, cells: Weight, il: int) -> Tensor:
        q, k, v = (self.linear(x, w, f"attn_{name}") for name in "qkv")
        q, k = self.rotate(q, w, "attn_q"), self.rotate(k, w, "attn_k")
        how: dict[str, Any] = {"head_dim": self.config.head_dim, "sees_all": self.sees_all(il)}
        how |= {"n_runs": MAX_RUNS if self.has_windows else 1, "scale": self.scale}
        a = ops.self_attention(q, k, self.values(v), cells, **how)
        return self.linear(a, w, "attn_out")

    def linear(self, x: Tensor, w: Weights, name: str) -> Tensor:
        return linear(x, w, name)

    def values(self, v: Tensor) -> Tensor:
        return v

    def sees_all(self, il: int) -> bool:
        """Return whether layer il attends to the complete picture, not to the window."""
        return True

    def rotate(self, x: Tensor, w: Weights, name: str) -> Tensor:
        """Apply norms of heads and RoPE to q or k. The default returns x."""
        return x

    def feed_forward(self, x: Tensor, w: Weights) -> Tensor:
        if self.gated:
            gate, up = self.linear(x, w, "ffn_gate"), self.linear(x, w, "ffn_up")
            return self.linear(self.gated_product(gate, up), w, "ffn_down")
        return self.linear(self.activate(self.linear(x, w, "ffn_up")), w, "ffn_down")

    def activate(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.config.activation](x)

    def gated_product(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.config.activation == "silu":
            return ops.silu_mul(gate, up)
        return ops.mul(self.activate(gate), up)

    def norm(self, x: Tensor, w: Weights, name: str) -> Tensor:
        return ops.layer_norm(x, w(name), w.bias(name), self.config.eps)

    def after(self, h: Tensor, w: Weights, il: int) -> None:
        """Use the residual after layer il, for deepstack."""

    def project(self, h: Tensor, w: Weights) -> Tensor:
        """Return the rows for the text model from the residual after the last layer."""
        raise NotImplementedError


def read_matrix(gguf: GGUF, name: str) -> np.ndarray:
    """Return a tensor as f32 [rows, width], where `rows` joins all axes except the last."""
    info = gguf.tensors[name]
    values = dequantize(gguf.data(name), info.type, info.shape)
    if not np.isfinite(values).all():
        raise GGUFError(f"{gguf.paths[0]}: {name} has values that are not finite")
    return np.ascontiguousarray(values.reshape(-1, info.shape[-1]), np.float32)
