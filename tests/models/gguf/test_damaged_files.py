"""Damaged GGUF files of every kind raise typed errors."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.damage import damaged
from gguf_files import (
    ARRAY,
    STRING,
    U32,
    array,
    gguf_bytes,
    key,
    payload,
    string,
    tensor,
)
from gguf_reading import ARCH, read_everything, rejects, sample, write
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import examples

from vkbackend.errors import GGUFError, UnsupportedModel, VkbackendError
from vkbackend.models.gguf import header
from vkbackend.models.gguf.reader import GGUF


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    for path, word in (
        (tmp_path / "gone.gguf", "no such file"),
        (tmp_path, "directory"),
        (write(tmp_path, b""), "not a GGUF file"),
        (Path("a\0b"), "cannot be read"),
    ):
        with pytest.raises(GGUFError, match=word):
            GGUF.open(path)


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(GGUFError, match="not a regular file"):
        GGUF.open(tmp_path / "pipe")


HUGE = struct.pack("<Q", (1 << 64) - 1)
BAD_HEADERS = {
    "not GGUF": (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
    "version 1": (gguf_bytes(version=1), "version 1"),
    "version 4": (gguf_bytes(version=4), "version 4"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (b"GGUF" + struct.pack("<I", 3) + HUGE + bytes(40), "number of tensors"),
    "tensor count beyond the file": (
        b"GGUF" + struct.pack("<IQQ", 3, 9, 0) + bytes(64),
        "table of 9 tensors",
    ),
    "key count": (b"GGUF" + struct.pack("<IQ", 3, 0) + HUGE + bytes(40), "number of metadata keys"),
    "key length": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + HUGE + bytes(40), "length of metadata key 0"),
    "key not UTF-8": (gguf_bytes([key(b"\xff", U32, 1)]), "not UTF-8"),
    "key twice": (gguf_bytes([ARCH, ARCH]), "twice"),
    "value type": (gguf_bytes([string("k") + struct.pack("<I", 13) + bytes(16)]), "type 13"),
    "nested array": (
        gguf_bytes([string("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1) + bytes(16)]),
        "arrays of arrays",
    ),
    "string length": (gguf_bytes([string("k") + struct.pack("<I", STRING) + HUGE + bytes(8)]), "'k'"),
    "string not UTF-8": (gguf_bytes([ARCH, key("k", STRING, b"\xff\xfe")]), "'k' is not UTF-8"),
    "array length": (gguf_bytes([string("k") + struct.pack("<II", ARRAY, U32) + HUGE]), "length of 'k'"),
    "array beyond the file": (
        gguf_bytes([string("k") + struct.pack("<IIQ", ARRAY, STRING, 1000) + bytes(64)]),
        "needs 8000 bytes",
    ),
    "string in array beyond the file": (
        gguf_bytes([string("k") + struct.pack("<IIQ", ARRAY, STRING, 2) + HUGE + bytes(64)]),
        "value of 'k'",
    ),
    "alignment 0": (gguf_bytes([key("general.alignment", U32, 0)]), "power of two"),
    "alignment 48": (gguf_bytes([key("general.alignment", U32, 48)]), "power of two"),
    "alignment type": (gguf_bytes([key("general.alignment", STRING, "32")]), "expected a u32"),
    "dimensions": (gguf_bytes([], [tensor("t", [1] * 5)], bytes(64)), "5 dimensions"),
    "no dimension": (gguf_bytes([], [tensor("t", []) + bytes(8)], bytes(64)), "0 dimensions"),
    "empty dimension": (gguf_bytes([], [tensor("t", [0, 4])], bytes(64)), "impossible shape"),
    "shape overflow": (gguf_bytes([], [tensor("t", [1 << 32, 1 << 32])], bytes(64)), "impossible shape"),
    "part of a block": (gguf_bytes([], [tensor("t", [48], 8)], bytes(64)), "block of 32"),
    "unaligned": (gguf_bytes([], [tensor("t", [1], 0, 4)], bytes(64)), "alignment 32"),
    "offset beyond the file": (gguf_bytes([], [tensor("t", [1], 0, 1 << 40)], bytes(64)), "'t' ends at byte"),
    "tensor beyond the file": (gguf_bytes([], [tensor("t", [1 << 40])], bytes(64)), "'t' ends at byte"),
    "overlap": (gguf_bytes([], [tensor("t", [16]), tensor("u", [1], 0, 32)], bytes(64)), "overlap"),
    "tensor twice": (
        gguf_bytes([], [tensor("t", [1]), tensor("t", [1], 0, 32)], bytes(64)),
        "'t' appears twice",
    ),
    "no architecture": (gguf_bytes([key("k", U32, 1)]), "'general.architecture' is missing"),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_header(tmp_path: Path, name: str) -> None:
    raw, word = BAD_HEADERS[name]
    rejects(tmp_path, raw, word)


def test_unknown_tensor_type(tmp_path: Path) -> None:
    raw = gguf_bytes([], [tensor("blk.0.x", [32], 99)], bytes(64))
    rejects(tmp_path, raw, "'blk.0.x'", "type 99", error=UnsupportedModel)


def test_truncated_at_every_byte(tmp_path: Path) -> None:
    raw = sample()
    for length in range(len(raw)):
        path = write(tmp_path, raw[:length])
        with pytest.raises(GGUFError):
            read_everything(path)


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 1 << 32))
def test_random_damage_raises_typed_errors(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged(random.Random(seed), sample()))
    try:
        read_everything(path)
    except VkbackendError:
        pass


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=200))
def test_noise_after_the_magic(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 2) + noise)
    try:
        read_everything(path)
    except VkbackendError:
        pass


CUT_SHORT = """if True:
    import os, sys
    from vkbackend.errors import GGUFError
    from vkbackend.models.gguf.reader import GGUF

    def cut(frame, event, _):
        code = frame.f_code
        if code.co_name == function and code.co_filename.endswith("header.py"):
            os.truncate(path, left)

    for case in sys.argv[1:]:
        path, function, left = case.split(",")
        left = int(left)
        sys.settrace(cut)
        try:
            GGUF.open(path).get("long")
        except GGUFError as error:
            print(error)
        sys.settrace(None)
"""
READ_LATER = """if True:
    import os, sys
    from vkbackend.models.gguf.reader import GGUF
    with GGUF.open(sys.argv[1]) as g:
        os.truncate(sys.argv[1], 0)
        print(g.strings("long") == ["x"] * 200_000 and g.architecture == "llama")
"""


def output_of(script: str, *words: str) -> str:
    """Run a script in its own process, because reading a truncated file through a memory map would end the
    process."""
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, encoding="utf-8", timeout=60
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout


def test_files_truncated_while_they_are_read(tmp_path: Path) -> None:
    raw = gguf_bytes([ARCH, array("long", STRING, ["x"] * 200_000)], [tensor("t", [64])], bytes(256))
    cases = [("value", 50), ("value", 4096), ("skip_strings", 70_000), ("_place", 4096), ("_place", -1)]
    paths = [tmp_path / f"{i}.gguf" for i in range(len(cases))]
    for path in paths:
        path.write_bytes(raw)
    words = [f"{path},{name},{left % len(raw)}" for path, (name, left) in zip(paths, cases, strict=True)]
    lines = output_of(CUT_SHORT, *words).splitlines()
    for line, path in zip(lines, paths, strict=True):
        assert str(path) in line and "was truncated" in line


def test_the_header_is_readable_after_truncation(tmp_path: Path) -> None:
    path = write(tmp_path, gguf_bytes([ARCH, array("long", STRING, ["x"] * 200_000)]))
    assert output_of(READ_LATER, str(path)) == "True\n"


def test_a_large_hostile_array_costs_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert header.MAX_ARRAY == 1 << 24  # opening a file with so many strings takes 1.7 s
    monkeypatch.setattr(header, "MAX_ARRAY", 1 << 20)
    path = tmp_path / "sparse.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", ARRAY, STRING, 1 << 20)
    with open(path, "wb") as f:
        f.write(head)
        f.truncate(1 << 33)
    import resource  # not on Windows

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with GGUF.open(path) as g:
        assert g.metadata.describe("k") == "an array of 1048576 string"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4 << 16, "KiB"
    with open(path, "r+b") as f:
        f.seek(len(head) - 8)
        f.write(payload(10, 1 << 25))
    with pytest.raises(GGUFError, match="at most 1048576"):
        GGUF.open(path)
