"""A tiny random projector for a text model of the test data."""

from __future__ import annotations

from pathlib import Path

from oracles.fixture import write
from oracles.vision import build


def write_projector(path: Path, n_embd: int, *, damage: float | None = None) -> Path:
    """Write an mlp projector (LLaVA) with 4 rows per image. It needs no special tokens. `damage` replaces a
    weight."""
    fixture = build("llava")
    fixture.keys |= {"vision.image_size": 32}
    fixture.tensors["v.position_embd.weight"] = fixture.tensors["v.position_embd.weight"][:5]
    for name, n_in in (("mm.0", 64), ("mm.2", n_embd)):
        for kind in ("weight", "bias"):
            del fixture.tensors[f"{name}.{kind}"]
        fixture.matrix(name, n_embd, n_in, gain=2, bias=True)
    # With larger weights, the rows of plain pictures differ more.
    fixture.tensors["v.patch_embd.weight"] *= 4
    if damage is not None:
        fixture.tensors["mm.0.weight"][0, 0] = damage
    write(fixture, path)
    return path
