"""Runs a projector file's encoder on one device: pictures in, rows for the text model out."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np

from vkbackend.buffer import Home
from vkbackend.errors import InvalidArgument
from vkbackend.meta.load import Progress
from vkbackend.meta.mesh import Mesh
from vkbackend.models.architectures.base import Weights, all_weights
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.placement.resident import COUNTED, Resident
from vkbackend.models.placement.tensors import FileSource
from vkbackend.models.vision.config import TokenLimits, VisionConfig
from vkbackend.models.vision.encoder import CELLS
from vkbackend.models.vision.picture import Picture, Tile
from vkbackend.models.vision.projector_plan import ProjectorPlan, plan_projector, step_kind, step_rows
from vkbackend.models.vision.rows import KEY_NBYTES, ImageRows
from vkbackend.ops import CELL_BLOCK
from vkbackend.runtime import Device
from vkbackend.step import MAX_RUNS, Mix, Run, StepParams, step_words


class Projector:
    """An open projector. Its methods are called from one thread at a time. Its context manager frees the
    memory and closes the device."""

    def __init__(self, plan: ProjectorPlan, mesh: Mesh, free_before: int | None) -> None:
        self.encoder, self._plan, self._mesh = plan.encoder, plan, mesh
        self._free_before = free_before
        self.max_patches = plan.shape.n_rows
        self._step = StepParams(np.zeros(step_words(self.max_patches), np.uint32))

    @property
    def resident(self) -> Resident:
        return replace(self._plan.resident, is_loaded=True)

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
        residents: Sequence[Resident] = (),
        progress: Progress | None = None,
    ) -> Self:
        """Load a projector file on a device, and allocate memory for the largest picture. `text` is the text
        model's file, which must match. `residents` are models that are already loaded. The projector owns the
        device, also after an error.

        Raises GGUFError, UnsupportedModel, InvalidArgument, OutOfDeviceMemory.
        """
        mesh = Mesh([device])
        try:
            with GGUF.open(path) as gguf:
                plan = plan_projector(gguf, device, text=text, limits=limits)
                plan.check_fit(residents)
                free_before = device.free_nbytes()
                _load(plan, mesh, gguf, progress)
            return cls(plan, mesh, free_before)
        except BaseException:
            mesh.close()
            raise

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
        if n < (n_results := encoder.n_results(tile)):
            raise InvalidArgument(f"a picture of {n} patches; at least {n_results} are needed")
        n_rows = n + encoder.n_extra
        kind = step_kind(encoder, step_rows(encoder, n_rows))
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
        parts = parts.reshape(encoder.n_parts, -1, parts.shape[1])[:, :n_results]
        rows = np.ascontiguousarray(parts.transpose(1, 0, 2)).reshape(n_results, -1)
        return encoder.arranged(rows, tile.grid)

    def memory(self) -> dict[str, Any]:
        """Return the projector's row of `LLM.memory`."""
        device = self._mesh.devices[0]
        held: dict[str, Any] = {home.value: device.nbytes[home] for home in COUNTED}
        held["staging"] += held.pop(Home.VISIBLE.value) + held.pop(Home.SLOTS.value)
        held |= dict.fromkeys(("adapters", "mapped", "shared"), 0)
        held |= {"free_before": self._free_before, "free": device.free_nbytes()}
        return {"device": f"{device.name} (projector)", **held}

    def close(self) -> None:
        self._mesh.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tile_key(key: bytes, index: int) -> bytes:
    """Return the key of the rows of a tile of the picture with `key`."""
    return hashlib.sha256(key + index.to_bytes(4, "little")).digest()[:KEY_NBYTES]


def _load(plan: ProjectorPlan, mesh: Mesh, gguf: GGUF, progress: Progress | None) -> None:
    encoder = plan.encoder
    mesh.stores.load(plan.loads, FileSource(gguf, all_weights(encoder)), progress)
    blocks = np.arange(plan.shape.n_rows // CELL_BLOCK, dtype=np.uint32)[None]
    cells = mesh.stores.constant(CELLS, blocks)
    weights = Weights({**mesh.weights, f"{CELLS}.weight": cells})
    mesh.prepare(partial(encoder.forward, w=weights), plan.shape, plan.sizes)
    plan.device.drop_upload()
