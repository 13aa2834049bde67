"""Models whose metadata has other types and values."""

from __future__ import annotations

import math
import random
import struct
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from gguf_files import ARRAY, payload, with_keys
from oracles.fixture import write
from oracles.fixtures import FIXTURES, build

from fuzz.files import read_text, tokens_of
from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.gguf import reader
from vkbackend.models.gguf.fingerprint import fingerprint
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options
from vkbackend.models.placement.layout import lay_out
from vkbackend.models.placement.tensors import check_weights, notes, weights_in_file

VOCABULARIES = {"tokens of SPM": "llama", "tokens of BPE": "gpt2", "tokens of Gemma 4": "gemma4"}
CONTAINER = ("general.alignment", "split.count", "split.no", "split.tensors.count")
SPECIAL_FLOATS = [0.0, -1.0, 1e-40, 1e38, math.nan, math.inf, -math.inf]
TEXTS = ["", "yarn", "linear", "longrope", "gpt-2", b"\xff", "a", "zwölf", "\0"]
INTEGERS = {
    **{kind: (0, (1 << bits) - 1) for kind, bits in ((0, 8), (2, 16), (4, 32), (10, 64))},
    **{
        kind: (-1 << (bits - 1), (1 << (bits - 1)) - 1) for kind, bits in ((1, 8), (3, 16), (5, 32), (11, 64))
    },
}
F32, BOOL, STRING, F64 = 6, 7, 8, 12
KINDS = (*INTEGERS, F32, BOOL, STRING, F64)


def lay_out_model(gguf: GGUF) -> None:
    """Derive everything that depends on the metadata, up to the point where a device would be opened."""
    model = load_model(gguf)
    types = check_weights(gguf, model)
    notes(gguf, model, 64)
    weights_in_file(gguf, model)
    fingerprint(gguf)
    for table in model.ropes(64).values():
        table.rows(np.arange(64))
    for n_devices in (1, 2):
        lay_out(model, types, n_devices, Options("any.gguf", n_ctx=64))


def read_model(gguf: GGUF, name: str) -> None:
    (read_text if name in VOCABULARIES else lay_out_model)(gguf)


class Asked(reader.Metadata):
    keys: set[str] = set()  # noqa: RUF012

    def __contains__(self, name: object) -> bool:
        self.keys.add(str(name))
        return super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        self.keys.add(name)
        return super().__getitem__(name)


@cache
def made(name: str) -> tuple[bytes, list[str]]:
    """Return the file of a tiny model or vocabulary, and the keys that are read from it."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "m.gguf"
        if name in VOCABULARIES:
            path.write_bytes(tokens_of(VOCABULARIES[name]))
        else:
            write(build(name), path)
        patch.setattr(reader, "Metadata", Asked)
        Asked.keys = set()
        with GGUF.open(path) as gguf:
            read_model(gguf, name)
        return path.read_bytes(), sorted(Asked.keys | {*CONTAINER, "tokenizer.chat_template"})


def scalar(rng: random.Random, kind: int) -> Any:
    if kind in INTEGERS:
        low, high = INTEGERS[kind]
        return rng.choice((low, 0, 1, high, rng.randint(low, high), rng.randint(max(low, -9), min(high, 99))))
    if kind == BOOL:
        return rng.random() < 0.5
    if kind == STRING:
        return rng.choice(TEXTS)
    most = 1e308 if kind == F64 else 3e38
    return rng.choice((*SPECIAL_FLOATS, most, -most, rng.uniform(-9, 9)))


def value(rng: random.Random) -> bytes:
    """Return a random type and value, or array of values, as in a GGUF file."""
    kind = rng.choice(KINDS)
    if rng.random() < 0.5:
        return struct.pack("<I", kind) + payload(kind, scalar(rng, kind))
    items = [scalar(rng, kind) for _ in range(rng.randrange(7))] * rng.choice((1, 1, 50))
    return struct.pack("<IIQ", ARRAY, kind, len(items)) + b"".join(payload(kind, item) for item in items)


def with_other_metadata(rng: random.Random, name: str, path: Path) -> bytes:
    """Return the file of `made(name)` with one or two random values. `path` is for a temporary file."""
    raw, asked = made(name)
    path.write_bytes(raw)
    changed = {rng.choice(asked): value(rng) for _ in range(rng.choice((1, 2)))}
    with GGUF.open(path) as gguf:
        return with_keys(gguf, changed)


class ModelMetadata:
    """A case is the name of the fixture, a line break, and the file."""

    deadline_s = 60.0

    def __init__(self, folder: Path) -> None:
        self._path = folder / "any.gguf"
        self._names = [*FIXTURES, *VOCABULARIES]

    def make(self, rng: random.Random) -> bytes:
        name = rng.choice(self._names)
        return name.encode() + b"\n" + with_other_metadata(rng, name, self._path)

    def check(self, case: bytes) -> str:
        name, _, raw = case.partition(b"\n")
        self._path.write_bytes(raw)
        try:
            with GGUF.open(self._path) as gguf, np.errstate(all="ignore"):
                read_model(gguf, name.decode(errors="replace"))
        except (GGUFError, UnsupportedModel):
            return "refused"
        return "accepted"
