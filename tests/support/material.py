"""Test data consists of files in `tests/data`, files derived from these, and files in `../shared` if it
exists."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from derived import derived_once
from places import CACHE, SHARED
from places import DATA as DATA
from systems import link

from vkbackend.tools.demo.stories import tell_story

SHARED_MODELS, SHARED_VOCABULARIES = SHARED / "models", SHARED / "vocab"


def shared_models(*names: str) -> list[Any]:
    """Return parameters for the files in `../shared`. Their tests run only with --all, because `tests/data`
    contains models of the same formats."""
    present = (name for name in names if (SHARED_MODELS / f"{name}.gguf").is_file())
    return [pytest.param(name, id=name, marks=pytest.mark.wide) for name in present]


def lay_out_models(folder: Path) -> None:
    """Link all model files into one folder, and write `expected.json`, `expected_logits.npz` and
    `stories.txt` next to them. `stories.txt` contains 100 KB of words that the models know."""
    expected: dict[str, Any] = {}
    logits: dict[str, np.ndarray] = {}
    for source in (DATA, DATA / "derived", derived_once(DATA, CACHE), SHARED_MODELS):
        for path in source.glob("*.gguf"):
            link(path, folder / path.name)
        if (source / "expected.json").is_file():
            expected |= json.loads((source / "expected.json").read_text(encoding="utf-8"))
            with np.load(source / "expected_logits.npz") as held:
                logits |= {name: held[name] for name in held.files}
    (folder / "expected.json").write_text(json.dumps(expected), encoding="utf-8")
    np.savez(folder / "expected_logits.npz", **logits)  # type: ignore[arg-type]
    rng = random.Random(260)
    (folder / "stories.txt").write_text(
        "\n".join(tell_story(rng).text for _ in range(200)) + "\n", encoding="utf-8"
    )
