"""A tiny random projector for a text model of the test data."""

from __future__ import annotations

from pathlib import Path

from oracles.fixture import write
from oracles.vision import build


def write_projector(path: Path, n_embd: int, side: int = 96) -> Path:
    """Write an idefics3 projector of 4 rows a tile. Images become `side` pixels wide: 96 is a single tile."""
    fixture = build("idefics3")
    fixture.keys |= {"vision.projection_dim": n_embd, "vision.preproc_image_size": side}
    name = "mm.model.fc"
    del fixture.tensors[f"{name}.weight"]
    fixture.matrix(name, n_embd, 9 * 64)
    write(fixture, path)
    return path
