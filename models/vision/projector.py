"""Runs a projector file's encoder on one device: pictures in, rows for the text model out."""

from __future__ import annotations

import hashlib
import math
import os
from functools import partial
from typing import Self

import numpy as np

from vkbackend.errors import InvalidArgument, UnsupportedModel
from vkbackend.meta.load import Progress
from vkbackend.meta.mesh import Mesh
from vkbackend.meta.sizing import StepShape, measure
from vkbackend.meta.slices import Load
from vkbackend.meta.split import MIRRORED
from vkbackend.meta.step_kind import StepKind, Wanted, bucket
from vkbackend.models.architectures.base import Weights, all_weights
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.placement.tensors import FileSource, check_weights
from vkbackend.models.vision.config import TokenLimits, VisionConfig, projector_type
from vkbackend.models.vision.encoder import CELLS, Encoder
from vkbackend.models.vision.picture import Picture, Tile
from vkbackend.models.vision.registry import family
from vkbackend.models.vision.rows import KEY_NBYTES, ImageRows
from vkbackend.ops import CELL_BLOCK
from vkbackend.runtime import Device
from vkbackend.step import MAX_RUNS, Mix, Run, StepParams, step_words

MAX_PATCHES = 1 << 15  # A dispatch has up to 65,535 rows.


class Projector:
    """An open projector. Its methods are called from one thread at a time. Its context manager frees the
    memory and closes the device."""

    def __init__(self, encoder: Encoder, mesh: Mesh, limits: TokenLimits) -> None:
        self.encoder, self._mesh = encoder, mesh
        self.limits = limits
        self._group = math.lcm(CELL_BLOCK, encoder.n_merged)
        n_patches = encoder.most_patches(encoder.config.most_tokens(limits)) + encoder.n_extra
        if n_patches > MAX_PATCHES:
            raise InvalidArgument(
                f"{encoder.config.path}: pictures of {n_patches} patches; at most {MAX_PATCHES} are "
                "possible; use a smaller --image-max-tokens"
            )
        self.max_patches = self._rows(n_patches)
        self._step = StepParams(np.zeros(step_words(self.max_patches), np.uint32))

    @property
    def config(self) -> VisionConfig:
        return self.encoder.config

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        device: Device,
        *,
        text: GGUF | None = None,
        limits: TokenLimits | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Load a projector file on a device, and allocate memory for the largest picture. `text` is the text
        model's file, which must match. The projector owns the device, also after an error.

        Raises GGUFError, UnsupportedModel, InvalidArgument, OutOfDeviceMemory.
        """
        mesh = Mesh([device])
        try:
            with GGUF.open(path) as gguf:
                encoder: Encoder = family(projector_type(gguf), str(gguf.paths[0]))(gguf)
                if text:
                    check_text_model(encoder, text)
                encoder.both_ways = encoder.sees_both_ways(text)
                types = check_weights(gguf, encoder)
                projector = cls(encoder, mesh, limits or TokenLimits())
                projector._load(gguf, types, progress)
            return projector
        except BaseException:
            mesh.close()
            raise

    def _load(self, gguf: GGUF, types: dict[str, str], progress: Progress | None) -> None:
        mesh, encoder, n_rows = self._mesh, self.encoder, self.max_patches
        specs = all_weights(encoder)
        loads = [Load(s.name, s.shape, types[s.name], MIRRORED) for s in specs]
        mesh.stores.load(loads, FileSource(gguf, specs), progress)
        blocks = np.arange(n_rows // CELL_BLOCK, dtype=np.uint32)[None]
        cells = mesh.stores.constant(CELLS, blocks)
        weights = Weights({**mesh.weights, f"{CELLS}.weight": cells})
        shape = StepShape(
            n_rows,
            self._kind(n_rows).n_outputs,
            ((0, 0),),
            encoder.table_widths(),
            n_embd=encoder.config.projection_dim,
            encodes=True,
        )
        build, device = partial(encoder.forward, w=weights), mesh.devices[0]
        sizes = measure(mesh.devices, build, shape)
        if sizes.largest[0] > (most := device.limits.max_storage_range):
            n_tokens = n_rows * most // sizes.largest[0] // encoder.n_merged
            raise InvalidArgument(
                f"{encoder.config.path}: {device.name} reads {most} bytes at once, and pictures of {n_rows} "
                f"patches need {sizes.largest[0]}; use --image-max-tokens {n_tokens}, or another "
                "--mmproj-device"
            )
        mesh.prepare(build, shape, sizes)
        device.drop_upload()

    def _rows(self, n_patches: int) -> int:
        """Return the rows of the recorded step for a tile, in blocks of cells and complete results."""
        return self._group * bucket(-(-n_patches // self._group))

    def _kind(self, n_rows: int) -> StepKind:
        n_outputs = n_rows // self.encoder.n_merged * self.encoder.n_parts
        return StepKind(n_rows, n_outputs, Mix.PREFILL, Wanted(hidden=True))

    def encode(self, picture: Picture) -> list[ImageRows]:
        """Return the rows of each tile. Raises the errors of `encode_tile`."""
        return [self.encode_tile(picture.key, i, tile) for i, tile in enumerate(picture.tiles)]

    def encode_tile(self, key: bytes, index: int, tile: Tile) -> ImageRows:
        """Return the rows of tile `index` of the picture with `key`. Raises InvalidArgument for a tile with
        too many patches, and DeviceLost."""
        encoder = self.encoder
        return ImageRows(tile_key(key, index), self._encode(tile), encoder.grid(tile), encoder.both_ways)

    def _encode(self, tile: Tile) -> np.ndarray:
        """Return f32 [n_rows, n_embd * (1 + n_deepstack)]."""
        encoder, n = self.encoder, len(tile.patches)
        if n != math.prod(tile.grid) or n + encoder.n_extra > self.max_patches:
            raise InvalidArgument(
                f"a picture of {tile.grid[0]} x {tile.grid[1]} = {n} patches; at most {self.max_patches} are "
                "possible; use a smaller picture, or --image-max-tokens"
            )
        n_rows = n + encoder.n_extra
        kind = self._kind(self._rows(n_rows))
        step = self._mesh.recorded_step(kind)
        begins = encoder.windows(tile.grid)
        ends = [*begins[1:], n_rows]
        runs = [Run(0, a, b - a, a, begin=a, end=b) for a, b in zip(begins, ends, strict=True)]
        if len(runs) > MAX_RUNS:
            raise InvalidArgument(
                f"a picture of {tile.grid[0]} x {tile.grid[1]} patches has {len(runs)} windows; at most "
                f"{MAX_RUNS} are possible; use a smaller picture, or --image-max-tokens"
            )
        self._step.fill(np.zeros(n_rows, np.uint32), runs, [], Mix.PREFILL, typed=True)
        self._mesh.write_step(self._step, encoder.tables(tile))
        self._mesh.run(step)
        parts = self._mesh.outputs.read_hidden(kind.n_outputs)
        n_results = n // encoder.n_merged
        parts = parts.reshape(encoder.n_parts, -1, parts.shape[1])[:, :n_results]
        rows = np.ascontiguousarray(parts.transpose(1, 0, 2)).reshape(n_results, -1)
        return encoder.arranged(rows, tile.grid)

    def close(self) -> None:
        self._mesh.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tile_key(key: bytes, index: int) -> bytes:
    """Return the key of the rows of a tile of the picture with `key`."""
    return hashlib.sha256(key + index.to_bytes(4, "little")).digest()[:KEY_NBYTES]


def check_text_model(encoder: Encoder, text: GGUF) -> None:
    """Raise UnsupportedModel, which names both files, if the projector is for another text model."""
    c, arch, files = encoder.config, text.architecture, f"{encoder.config.path} and {text.paths[0]}"
    if arch not in encoder.text_architectures:
        raise UnsupportedModel(
            f"{files} do not match: projectors of type {c.projector!r} are for models of architecture "
            f"{', '.join(encoder.text_architectures)}, and the model's is {arch!r}"
        )
    n_embd, n_deep = text.u32(f"{arch}.embedding_length"), text.u32(f"{arch}.n_deepstack_layers", 0)
    if n_embd != c.projection_dim:
        raise UnsupportedModel(
            f"{files} do not match: the projector's rows have {c.projection_dim} values, the model's "
            f"embeddings {n_embd}; take both files from one model"
        )
    if n_deep != c.n_deepstack:
        raise UnsupportedModel(
            f"{files} do not match: the projector has {c.n_deepstack} deepstack layers, the model {n_deep}"
        )
