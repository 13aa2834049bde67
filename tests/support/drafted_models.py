"""Runners of tiny models for the tests of drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from device_sets import DEVICE_SETS, only, product
from oracles.fixture import write
from oracles.fixtures import build
from places import DATA
from runners import load_runner

from vkbackend.models.engine.runner.runner import Runner

ALONE, PAIR = (p for p in DEVICE_SETS if p.id in ("0", "0,0"))


def open_runner(folder: Path, name: str, devices: list[str], **options: Any) -> Runner:
    """`folder` keeps the files of models."""
    if name.endswith("+q8_0"):
        name = name.removesuffix("+q8_0")
        options |= {"type_k": "q8_0", "type_v": "q8_0"}
    path = folder / f"{name}.gguf"
    if name.startswith("stories"):
        path = DATA / f"{name}.gguf"
    elif not path.exists():
        write(build(name), path)
    sizes = {"n_ctx": 64, "n_slots": 4, "n_ubatch": 32, "n_snapshots": 1}
    return load_runner(path, devices=devices, exact=True, speculation="ngram", **{**sizes, **options})


def on_one_and_two(names: tuple[str, ...], *few: str) -> list[Any]:
    """Return each model on one and on two devices. By default, only the parameters `few` run."""
    return only(product(names, [ALONE, PAIR]), *few)
