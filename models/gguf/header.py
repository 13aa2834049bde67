"""Parses the metadata index and the tensor table of a GGUF file (versions 2 and 3, little endian).

The header is read with `pread` before mapping. If the file is truncated, a short `pread` raises an error, but
reading from a map would end the process. Every count is checked before use, so a damaged file raises
`GGUFError` quickly.
"""

import itertools
import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.formats import NEWER
from vkbackend.paths import why
from vkbackend.system.files import read_at

# The largest models have 262,144 tokens, 580,000 merges, 20 MB of header and 60,000 tensors. The limits are
# at least four times as large.
MAX_HEADER = 1 << 28  # Bytes of metadata and tensor table.
MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 18
MAX_KEY_BYTES = 1 << 16  # the format's limit
MAX_NAME_BYTES = 256
MAX_ARRAY = 1 << 24  # elements
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32
FIRST_READ, MAX_READ = 1 << 16, 1 << 20  # bytes

SCALARS = {
    0: ("u8", "B"),
    1: ("i8", "b"),
    2: ("u16", "H"),
    3: ("i16", "h"),
    4: ("u32", "I"),
    5: ("i32", "i"),
    6: ("f32", "f"),
    7: ("bool", "B"),
    10: ("u64", "Q"),
    11: ("i64", "q"),
    12: ("f64", "d"),
}
BOOL, STRING, ARRAY = 7, 8, 9
INTEGERS = frozenset({0, 1, 2, 3, 4, 5, 10, 11})
FLOATS = frozenset({6, 12})
# type id -> (name, elements per block, bytes per block)
TENSOR_TYPES = {
    int(t): (t.name.lower(), *GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType if t in GGML_QUANT_SIZES
} | NEWER

U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`shape` is in numpy order (GGUF dims reversed), so a weight is [n_out, n_in]."""

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int
    file: int  # Index into GGUF.paths.
    offset: int  # Byte offset in this file.


@dataclass(frozen=True, slots=True)
class Value:
    """An undecoded metadata value, encoded in bytes `start:stop` of the header."""

    type: int
    count: int  # number of elements; 1 for scalars and strings
    is_array: bool
    start: int
    stop: int

    def describe(self) -> str:
        name = "string" if self.type == STRING else SCALARS[self.type][0]
        return f"an array of {self.count} {name}" if self.is_array else f"a {name}"


# ---- parsing one file ----


class _Cursor:
    """A read position in the header. Every read checks that the file has enough bytes."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd, self.pos = path, fd, 0
        self.buf = bytearray()
        self.file_bytes = os.fstat(fd).st_size
        self.end = min(self.file_bytes, MAX_HEADER)

    def error(self, message: str) -> GGUFError:
        return GGUFError(f"{self.path}: {message} (byte {self.pos} of {self.file_bytes})")

    def need(self, n_bytes: int, name: str) -> None:
        left = self.end - self.pos
        if n_bytes <= left:
            self._read_to(self.pos + n_bytes)
            return
        if self.end < self.file_bytes:
            raise self.error(f"the header exceeds {MAX_HEADER} bytes at {name}; the file is damaged")
        raise self.error(
            f"truncated or damaged: {name} needs {n_bytes} bytes, {left} are left; get the file again"
        )

    def _read_to(self, stop: int) -> None:
        if stop <= len(self.buf):
            return
        stop = min(self.end, max(stop, FIRST_READ, 2 * len(self.buf)))
        while (n_read := len(self.buf)) < stop:
            if not (piece := read_at(self.fd, min(stop - n_read, MAX_READ), n_read)):
                raise self.error(f"the file was truncated to {n_read} bytes during reading; get it again")
            self.buf += piece

    def number(self, code: str, name: str) -> int:
        self.need(struct.calcsize(code), name)
        (value,) = struct.unpack_from("<" + code, self.buf, self.pos)
        self.pos += struct.calcsize(code)
        return int(value)

    def count(self, code: str, name: str, limit: int, min_bytes: int) -> int:
        """Read how many items follow. Raise GGUFError if the file is too short for that number of items of
        `min_bytes`."""
        n = self.number(code, name)
        if n > limit:
            raise self.error(f"{name} is {n}, at most {limit} are accepted; the file is damaged")
        self.need(n * min_bytes, f"{name} {n}")
        return n

    def string(self, name: str, limit: int) -> str:
        n = self.count("Q", f"the length of {name}", limit, 1)
        raw = self.buf[self.pos : self.pos + n]
        try:
            text = raw.decode()
        except UnicodeDecodeError as e:
            raise self.error(f"{name} is not UTF-8: {bytes(raw[:64])!r}") from e
        self.pos += n
        return text

    def value(self, key: str) -> Value:
        name = f"the value of {key!r}"
        kind, n, is_array = self.number("I", f"the type of {key!r}"), 1, False
        if kind == ARRAY:
            is_array, kind = True, self.number("I", f"the element type of {key!r}")
        if kind != STRING and kind not in SCALARS:
            nested = ": arrays of arrays are not accepted" if kind == ARRAY else ""
            raise self.error(f"{name} has unknown type {kind}{nested}")
        width = 8 if kind == STRING else struct.calcsize(SCALARS[kind][1])
        if is_array:
            n = self.count("Q", f"the length of {key!r}", MAX_ARRAY, width)
        start = self.pos
        if kind == STRING:
            self.skip_strings(n, name)
        else:
            self.need(n * width, name)
            self.pos += n * width
        return Value(kind, n, is_array, start, self.pos)

    def skip_strings(self, n: int, name: str) -> None:
        """Skip `n` strings, in 0.1 us each. Only this part of opening a file takes longer for a larger
        vocabulary."""
        pos, unpack, buf, i = self.pos, U64.unpack_from, self.buf, 0
        while i < n:
            try:
                for i in range(i, n):  # noqa: B007, B020  (it goes on where it stopped)
                    pos += unpack(buf, pos)[0] + 8
                break
            except (struct.error, OverflowError):
                self.need(pos + 8 - self.pos, name)
        self.need(pos - self.pos, name)
        self.pos = pos


@dataclass(frozen=True, slots=True)
class Part:
    path: Path
    header: bytearray
    buf: mmap.mmap
    values: dict[str, Value]
    tensors: list[TensorInfo]


def parse(path: Path, index: int) -> Part:
    try:
        mode = path.stat().st_mode  # Opening a named pipe would wait for a writer.
    except FileNotFoundError:
        raise GGUFError(f"{path}: no such file; check the path") from None
    except (OSError, ValueError) as e:  # ValueError: the path contains a NUL.
        raise GGUFError(f"{path}: cannot be read: {why(e)}") from e
    if stat.S_ISDIR(mode):
        raise GGUFError(f"{path} is a directory; give the path of a .gguf file")
    if not stat.S_ISREG(mode):
        raise GGUFError(f"{path} is not a regular file; give the path of a .gguf file")
    try:
        with open(path, "rb", buffering=0) as file:
            return _parse_file(_Cursor(path, file.fileno()), index)
    except OSError as e:
        raise GGUFError(f"{path}: cannot be read: {why(e)}") from e


def _parse_file(cur: _Cursor, index: int) -> Part:
    values, tensors = _parse_header(cur, index)
    del cur.buf[cur.pos :]
    try:
        mapped = mmap.mmap(cur.fd, cur.file_bytes, access=mmap.ACCESS_READ)
    except ValueError:  # the file was truncated
        raise cur.error("the file was truncated during reading; get it again") from None
    return Part(cur.path, cur.buf, mapped, values, tensors)


def _parse_header(cur: _Cursor, index: int) -> tuple[dict[str, Value], list[TensorInfo]]:
    if cur.file_bytes < 24:
        raise GGUFError(f"{cur.path}: not a GGUF file: shorter than the 24 bytes of a GGUF header")
    cur.need(24, "the beginning")
    if (magic := bytes(cur.buf[:4])) != b"GGUF":
        raise GGUFError(f"{cur.path}: not a GGUF file: it begins with {magic!r} instead of b'GGUF'")
    cur.pos = 4
    version = cur.number("I", "the version")
    if version and version & 0xFFFF == 0:
        raise GGUFError(f"{cur.path}: a big-endian GGUF file; convert it to little-endian")
    if version not in (2, 3):
        raise GGUFError(
            f"{cur.path}: GGUF version {version} is not supported, only 2 and 3; convert the model again"
        )
    # A tensor's entry takes at least 32 bytes (empty name, one dim, type, offset). A metadata entry takes at
    # least 13 bytes (empty key, type, one byte).
    n_tensors = cur.count("Q", "the number of tensors", MAX_TENSORS, 0)
    n_keys = cur.count("Q", "the number of metadata keys", MAX_KEYS, 13)

    values: dict[str, Value] = {}
    for i in range(n_keys):
        key = cur.string(f"metadata key {i}", MAX_KEY_BYTES)
        if key in values:
            raise cur.error(f"metadata key {key!r} appears twice")
        values[key] = cur.value(key)

    alignment = DEFAULT_ALIGNMENT
    if (value := values.get("general.alignment")) is not None:
        if value.type != 4 or value.is_array:
            raise cur.error(f"'general.alignment' is {value.describe()}, expected a u32")
        (alignment,) = struct.unpack_from("<I", cur.buf, value.start)
        if alignment & (alignment - 1) or not 1 <= alignment <= MAX_ALIGNMENT:
            raise cur.error(
                f"'general.alignment' is {alignment}, expected a power of two up to {MAX_ALIGNMENT}"
            )

    cur.need(32 * n_tensors, f"a table of {n_tensors} tensors")
    table = [_parse_tensor(cur, i, index) for i in range(n_tensors)]
    data_start = -(-cur.pos // alignment) * alignment
    return values, _place(cur, table, data_start, alignment)


def _parse_tensor(cur: _Cursor, i: int, index: int) -> TensorInfo:
    """Read a tensor's entry, whose offset counts from the start of the data."""
    name = cur.string(f"the name of tensor {i}", MAX_NAME_BYTES)
    n_dims = cur.number("I", f"the dimension count of tensor {name!r}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cur.error(f"tensor {name!r} has {n_dims} dimensions, 1 to {MAX_DIMS} are accepted")
    dims = [cur.number("Q", f"the shape of tensor {name!r}") for _ in range(n_dims)]
    kind = cur.number("I", f"the type of tensor {name!r}")
    offset = cur.number("Q", f"the offset of tensor {name!r}")
    if kind not in TENSOR_TYPES:
        raise UnsupportedModel(f"{cur.path}: tensor {name!r} has unknown type {kind}")
    type_name, block_elements, block_bytes = TENSOR_TYPES[kind]
    n_elements = 1
    for d in dims:
        n_elements *= d
    if not 0 < n_elements < 1 << 63:
        raise cur.error(f"tensor {name!r} has an impossible shape {dims}")
    if dims[0] % block_elements:
        raise cur.error(
            f"tensor {name!r}: row length {dims[0]} is not a multiple of the {type_name} block of "
            f"{block_elements}"
        )
    return TensorInfo(
        name, tuple(reversed(dims)), type_name, n_elements // block_elements * block_bytes, index, offset
    )


def _place(cur: _Cursor, table: list[TensorInfo], data_start: int, alignment: int) -> list[TensorInfo]:
    """Check tensors' names, alignment, overlap and bounds. Return the tensors with offsets from the file's
    start."""
    tensors, names = [], set()
    for t in table:
        start = data_start + t.offset
        if t.name in names:
            raise cur.error(f"tensor {t.name!r} appears twice")
        if t.offset % alignment:
            raise cur.error(
                f"tensor {t.name!r}: offset {t.offset} is not a multiple of the alignment {alignment}"
            )
        if start + t.nbytes > cur.file_bytes:
            raise cur.error(
                f"truncated or damaged: tensor {t.name!r} ends at byte {start + t.nbytes}; get the file again"
            )
        names.add(t.name)
        tensors.append(TensorInfo(t.name, t.shape, t.type, t.nbytes, t.file, start))
    by_offset = sorted(tensors, key=lambda t: t.offset)
    for a, b in itertools.pairwise(by_offset):
        if a.offset + a.nbytes > b.offset:
            raise cur.error(f"tensors {a.name!r} and {b.name!r} overlap")
    return tensors
