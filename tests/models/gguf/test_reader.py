"""The GGUF reader: real files against the reference reader, split models, and damage of every kind."""

import os
import resource
import struct
import subprocess
import sys
from pathlib import Path

import gguf as reference
import numpy as np
import pytest
from counted_calls import counted_calls
from gguf_files import (
    ARRAY,
    BOOL,
    F32,
    STRING,
    U32,
    array,
    gguf_bytes,
    key,
    payload,
    string,
    tensor,
    vocabulary,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from vkbackend.errors import GGUFError, UnsupportedModel, VkbackendError
from vkbackend.models.gguf.reader import GGUF, Metadata

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


# ---- well formed files ----


def test_values_and_tensors(tmp_path: Path) -> None:
    with GGUF.open(write(tmp_path, sample())) as g:
        assert g.architecture == "llama"
        assert dict(g.metadata).keys() == {"general.architecture", *(f"a.{k}" for k in _NAMES)}
        assert (g.u32("a.u32"), g.f32("a.f32"), g.boolean("a.bool"), g.get("a.u64")) == (
            7,
            0.5,
            True,
            1 << 40,
        )
        assert g.strings("a.strings") == ["x", "", "zwölf"]
        assert g.ints("a.ints").tolist() == [1, 2, 3]
        assert g.get("a.bools").tolist() == [True, False]
        w, b = g.tensors["w"], g.tensors["b"]
        assert (w.shape, w.type, w.nbytes, w.file) == ((2, 64), "q8_0", 136, 0)
        assert (b.shape, b.type, b.nbytes, b.offset - w.offset) == ((3,), "f32", 12, 160)
        assert g.data("w").tolist() == list(range(136))
        assert g.data("b").view(np.float32).tolist() == [1, 2, 3]
        assert not g.data("w").flags.writeable and not g.data("w").flags.owndata


_NAMES = ("u32", "f32", "bool", "u64", "strings", "ints", "bools")


def test_version_2_is_read(tmp_path: Path) -> None:
    assert GGUF.open(write(tmp_path, gguf_bytes([ARCH], version=2))).architecture == "llama"


@pytest.mark.parametrize("name", ["stories-narrow-F16", "stories-narrow-Q4_0", "stories-w256-IQ4_XS"])
def test_agrees_with_the_reference_reader(models: Path, name: str) -> None:
    path = models / f"{name}.gguf"
    theirs = reference.GGUFReader(path)
    with GGUF.open(path) as g:
        fields = {k: f for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
        assert list(g.metadata) == list(fields)
        for k, f in fields.items():
            found = g.get(k)
            assert (found.tolist() if isinstance(found, np.ndarray) else found) == f.contents(), k
        assert list(g.tensors) == [t.name for t in theirs.tensors]
        for t in theirs.tensors:
            ours = g.tensors[t.name]
            assert ours.shape == tuple(reversed(t.shape.tolist()))
            assert (ours.type, ours.offset, ours.nbytes) == (
                t.tensor_type.name.lower(),
                t.data_offset,
                t.n_bytes,
            )
            assert np.array_equal(g.data(t.name), t.data.view(np.uint8).ravel())


def test_opening_takes_one_step_for_a_token(tmp_path: Path) -> None:
    """Over which it moves; nothing is decoded. Floats and integers take none."""
    calls = []
    for n in (1_000, 151_000):
        types, floats = [1] * n, array("tokenizer.ggml.scores", F32, [0.0] * n)
        raw = vocabulary("llama", [f"token {i}" for i in range(n)], types=types, extra=[floats])
        path = write(tmp_path, raw)
        with counted_calls() as counted, GGUF.open(path) as g:
            pass
        calls.append(counted.total())
        with GGUF.open(path) as g:
            assert g.strings("tokenizer.ggml.tokens")[-1] == f"token {n - 1}"
    assert 150_000 <= calls[1] - calls[0] <= 151_000


def test_a_value_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking whether it is there decodes nothing: the strings of a vocabulary take a tenth of a second."""
    decoded, decode = list[str](), Metadata._strings
    monkeypatch.setattr(
        Metadata, "_strings", lambda self, key, v: decoded.append(key) or decode(self, key, v)
    )
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([array("tokens", STRING, ["a", "b"])]))
    with GGUF.open(path) as g:
        assert "tokens" in g.metadata and not decoded
        assert g.strings("tokens") == ["a", "b"] and decoded == ["tokens"]


def test_close_keeps_views_alive(tmp_path: Path) -> None:
    g = GGUF.open(write(tmp_path, sample()))
    view = g.data("w")
    g.close()
    assert view[5] == 5
    for ask in (lambda: g.data("w"), lambda: g.get("a.u32")):
        with pytest.raises(GGUFError, match="after close"):
            ask()


# ---- typed reads ----


def test_typed_reads_name_key_found_and_expected(tmp_path: Path) -> None:
    keys = [
        ARCH,
        key("f", F32, 1.5),
        key("nan", F32, float("nan")),
        key("large", 12, 1e300),
        key("neg", 5, -1),
        array("s", STRING, ["x"]),
    ]
    with GGUF.open(write(tmp_path, gguf_bytes(keys))) as g:
        for read, name, *words in (
            (g.u32, "f", "a f32", "an integer"),
            (g.u32, "neg", "-1", "an integer"),
            (g.u32, "gone", "missing", "an integer"),
            (g.f32, "nan", "nan", "finite"),
            (g.f32, "large", "1e+300", "32 bits"),
            (g.string, "s", "an array of 1 string", "a string"),
            (g.ints, "s", "an array of 1 string", "an array of integers"),
            (g.strings, "f", "a f32", "an array of strings"),
            (g.floats, "f", "a f32", "an array of floats"),
            (g.boolean, "f", "a f32", "a bool"),
        ):
            with pytest.raises(GGUFError) as e:
                read(name)
            assert all(word in str(e.value) for word in (repr(name), *words)), str(e.value)
        assert g.u32("gone", 3) == 3 and g.strings("gone", None) is None
        with pytest.raises(GGUFError, match="no tensor 'w'"):
            g.data("w")


# ---- split models ----


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
def test_split_model_that_disagrees(tmp_path: Path, override: dict[str, int]) -> None:
    with pytest.raises(GGUFError, match=next(iter(override))):
        GGUF.open(parts(tmp_path, 3, **override)[0])


@pytest.mark.parametrize("name", ["split.count", "split.no", "split.tensors.count"])
@pytest.mark.parametrize(
    "of",
    [array("", 2, [1, 2]), array("", U32, []), key("", F32, 1.0), key("", STRING, "1")],
    ids=("array", "empty", "float", "string"),
)
def test_split_model_whose_counts_are_none(tmp_path: Path, name: str, of: bytes) -> None:
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


def test_part_that_lost_its_name(tmp_path: Path) -> None:
    parts(tmp_path, 2)[0].rename(tmp_path / "m.gguf")
    with pytest.raises(GGUFError, match=r"'split.count' is 2"):
        GGUF.open(tmp_path / "m.gguf")


def test_merged_file_keeps_a_count_of_zero(tmp_path: Path) -> None:
    raw = gguf_bytes([ARCH, key("split.count", 2, 0)])
    assert GGUF.open(write(tmp_path, raw)).architecture == "llama"


def test_impossible_part_number(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="part 3 of 2"):
        GGUF.open(tmp_path / "m-00003-of-00002.gguf")


# ---- bad input ----


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, word in (
        (tmp_path / "gone.gguf", "no such file"),
        (tmp_path, "directory"),
        (tmp_path / "pipe", "not a regular file"),
        (write(tmp_path, b""), "not a GGUF file"),
        (Path("a\0b"), "cannot be read"),
    ):
        with pytest.raises(GGUFError, match=word):
            GGUF.open(path)


HUGE = struct.pack("<Q", (1 << 64) - 1)
BAD_HEADERS = {
    "not GGUF": (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
    "version 1": (gguf_bytes(version=1), "version 1"),
    "version 4": (gguf_bytes(version=4), "version 4"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big endian"),
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
        "'t' is there twice",
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


@settings(max_examples=600, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(sample()) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_end_in_typed_errors(tmp_path_factory: pytest.TempPathFactory, flips: list) -> None:
    raw = bytearray(sample())
    for position, value in flips:
        raw[position] = value
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(raw)
    try:
        read_everything(path)
    except VkbackendError:
        pass


@settings(max_examples=300, deadline=None)
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
    from vkbackend.models.gguf.reader import GGUF, Metadata
    path, function, left = sys.argv[1], sys.argv[2], int(sys.argv[3])

    def cut(frame, event, _):
        code = frame.f_code
        if code.co_name == function and code.co_filename.endswith("header.py"):
            os.truncate(path, left)

    sys.settrace(cut)
    try:
        GGUF.open(path).get("long")
    except GGUFError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("function", "left"),
    [("value", 50), ("value", 4096), ("skip_strings", 70_000), ("_place", 4096), ("_place", -1)],
)
def test_a_file_cut_short_while_it_is_read(tmp_path: Path, function: str, left: int) -> None:
    """As by a program that writes it again; read through a map that is a signal that ends the process."""
    raw = gguf_bytes([ARCH, array("long", STRING, ["x"] * 200_000)], [tensor("t", [64])], bytes(256))
    path = write(tmp_path, raw)
    command = [sys.executable, "-c", CUT_SHORT, str(path), function, str(left % len(raw))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert str(path) in done.stdout and "was cut short" in done.stdout


@pytest.mark.own_process
def test_the_header_outlives_the_file(tmp_path: Path) -> None:
    """What is asked for later was read already."""
    path = write(tmp_path, gguf_bytes([ARCH, array("long", STRING, ["x"] * 200_000)]))
    with GGUF.open(path) as g:
        os.truncate(path, 0)
        assert g.strings("long") == ["x"] * 200_000 and g.architecture == "llama"


def test_a_large_hostile_array_costs_little(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", ARRAY, STRING, 1 << 24)
    with open(path, "wb") as f:
        f.write(head)
        f.truncate(1 << 33)  # 8 GiB of empty strings, as a sparse file
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with GGUF.open(path) as g:  # 1.7 s on two cores
        assert g.metadata.describe("k") == "an array of 16777216 string"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4 << 20, "KiB"
    with open(path, "r+b") as f:
        f.seek(len(head) - 8)
        f.write(payload(10, 1 << 25))
    with pytest.raises(GGUFError, match="at most 16777216"):
        GGUF.open(path)
