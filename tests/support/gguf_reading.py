"""A small GGUF file, and functions that read complete files."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf_files import (
    BOOL,
    F32,
    STRING,
    U32,
    array,
    gguf_bytes,
    key,
    tensor,
)

from vkbackend.errors import GGUFError
from vkbackend.models.gguf.reader import GGUF

ARCH = key("general.architecture", STRING, "llama")


def sample() -> bytes:
    keys = [
        ARCH,
        key("a.u32", U32, 7),
        key("a.f32", F32, 0.5),
        key("a.bool", BOOL, True),
        key("a.u64", 10, 1 << 40),
        array("a.strings", STRING, ["x", "", "zwölf"]),
        array("a.ints", U32, [1, 2, 3]),
        array("a.bools", BOOL, [True, False]),
    ]
    tensors = [tensor("w", [64, 2], 8, 0), tensor("b", [3], 0, 160)]
    return gguf_bytes(keys, tensors, bytes(range(136)) + bytes(24) + struct.pack("<3f", 1, 2, 3))


def write(tmp_path: Path, raw: bytes, name: str = "m.gguf") -> Path:
    path = tmp_path / name
    path.write_bytes(raw)
    return path


def read_everything(path: Path) -> None:
    with GGUF.open(path) as g:
        for name in g.metadata:
            g.get(name)
        for name, t in g.tensors.items():
            assert g.data(name).nbytes == t.nbytes
        _ = g.architecture


def rejects(tmp_path: Path, raw: bytes, *words: str, error: type[Exception] = GGUFError) -> None:
    path = write(tmp_path, raw)
    with pytest.raises(error) as e:
        read_everything(path)
    assert str(path) in str(e.value)
    for word in words:
        assert word in str(e.value)
