"""Every family's rows equal transformers'. Projectors and texts that do not match are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS, nmse
from oracles.fixture import write
from oracles.vision import BUILDERS, GRIDS, build, pixels_of
from places import GOLDEN

from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.vision.patches import cut_patches
from vkbackend.models.vision.picture import Picture, Tile
from vkbackend.models.vision.projector import Projector

DEVICES = [
    pytest.param("numpy"),
    *(pytest.param(p.values[0][0], marks=p.marks, id=p.id) for p in DEVICE_SETS[:1]),
]
# Activations and sums are F32 on both sides.
BOUND = 1e-9


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("projectors")


@pytest.fixture(scope="module")
def golden() -> Iterator[Any]:
    with np.load(GOLDEN / "vision.npz") as arrays:
        yield dict(arrays)


def open_projector(models: Path, name: str, on: str, **options: Any) -> Projector:
    path = models / f"{name}.gguf"
    if not path.exists():
        write(build(name), path)
    return Projector.open(path, open_devices([on], exact=True)[0], **options)


def picture_of(name: str, projector: Projector) -> Picture:
    patch = projector.config.patch_side
    patches = cut_patches(pixels_of(name, patch), patch, projector.encoder.merge)
    return Picture(bytes(16), (Tile(patches, GRIDS[name]),), (0,))


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("name", BUILDERS)
def test_rows_equal_transformers(models: Path, golden: Any, name: str, on: str) -> None:
    with open_projector(models, name, on) as projector:
        [rows] = projector.encode(picture_of(name, projector))
        assert rows.n_rows == rows.grid[0] * rows.grid[1]
        assert nmse(rows.values, golden[name]) <= BOUND
