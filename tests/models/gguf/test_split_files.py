"""A model may be split into several files, and any of them can be opened. A wrong file is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf_files import (
    F32,
    STRING,
    U32,
    array,
    gguf_bytes,
    key,
    string,
    tensor,
)
from gguf_reading import ARCH, rejects, write

from vkbackend.errors import GGUFError
from vkbackend.models.gguf.reader import GGUF


def parts(tmp_path: Path, count: int, **override: int) -> list[Path]:
    out = []
    for i in range(count):
        stated = {"split.count": count, "split.no": i, "split.tensors.count": count} | override
        keys = [key(k, 5 if k == "split.tensors.count" else 2, v) for k, v in stated.items() if v >= 0]
        raw = gguf_bytes(
            [ARCH, *keys] if i == 0 else keys, [tensor(f"t{i}", [4])], struct.pack("<4f", *[i] * 4)
        )
        out.append(write(tmp_path, raw, f"m-{i + 1:05d}-of-{count:05d}.gguf"))
    return out


@pytest.mark.parametrize("given_part", [0, 2])
def test_split_model_from_any_part(tmp_path: Path, given_part: int) -> None:
    paths = parts(tmp_path, 3)
    with GGUF.open(paths[given_part]) as g:
        assert g.paths == paths and g.architecture == "llama"
        assert [g.tensors[f"t{i}"].file for i in range(3)] == [0, 1, 2]
        assert [g.data(f"t{i}").view(np.float32)[0] for i in range(3)] == [0, 1, 2]


def test_split_model_with_a_part_missing(tmp_path: Path) -> None:
    paths = parts(tmp_path, 3)
    paths[1].unlink()
    with pytest.raises(GGUFError, match=r"1 of 3 parts are missing: m-00002-of-00003\.gguf"):
        GGUF.open(paths[0])


@pytest.mark.parametrize(
    "override",
    [{"split.count": 4}, {"split.no": 0}, {"split.tensors.count": 2}, {"split.count": -1}],
    ids=repr,
)
def test_split_model_whose_parts_disagree(tmp_path: Path, override: dict[str, int]) -> None:
    with pytest.raises(GGUFError, match=next(iter(override))):
        GGUF.open(parts(tmp_path, 3, **override)[0])


@pytest.mark.parametrize("name", ["split.count", "split.no", "split.tensors.count"])
@pytest.mark.parametrize(
    "of",
    [array("", 2, [1, 2]), array("", U32, []), key("", F32, 1.0), key("", STRING, "1")],
    ids=("array", "empty", "float", "string"),
)
def test_split_model_with_invalid_counts(tmp_path: Path, name: str, of: bytes) -> None:
    raw = gguf_bytes([ARCH, string(name) + of[8:]])
    rejects(tmp_path, raw, repr(name), "expected an integer")
    paths = parts(tmp_path, 2, **{name: -1})
    paths[1].write_bytes(gguf_bytes([string(name) + of[8:]], [tensor("t1", [4])], bytes(16)))
    with pytest.raises(GGUFError, match="split"):
        GGUF.open(paths[0])


def test_split_model_with_a_tensor_twice(tmp_path: Path) -> None:
    paths = parts(tmp_path, 2)
    paths[1].write_bytes(paths[1].read_bytes().replace(b"t1", b"t0"))
    with pytest.raises(GGUFError, match="'t0' is also in"):
        GGUF.open(paths[0])


def test_renamed_part(tmp_path: Path) -> None:
    parts(tmp_path, 2)[0].rename(tmp_path / "m.gguf")
    with pytest.raises(GGUFError, match=r"'split.count' is 2"):
        GGUF.open(tmp_path / "m.gguf")


def test_merged_file_keeps_a_count_of_zero(tmp_path: Path) -> None:
    raw = gguf_bytes([ARCH, key("split.count", 2, 0)])
    assert GGUF.open(write(tmp_path, raw)).architecture == "llama"


def test_impossible_part_number(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="part 3 of 2"):
        GGUF.open(tmp_path / "m-00003-of-00002.gguf")
