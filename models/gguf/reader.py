"""Opens GGUF files. Metadata is decoded on access, and tensors' bytes are views of a memory map. All parts of
a split model (`-00001-of-0000N.gguf`) form one `GGUF`.
"""

import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from vkbackend.errors import GGUFError
from vkbackend.models.gguf.header import (
    ARRAY,
    BOOL,
    FLOATS,
    INTEGERS,
    SCALARS,
    STRING,
    U64,
    Part,
    TensorInfo,
    Value,
    parse,
)

__all__ = ["GGUF", "REQUIRED", "Metadata", "TensorInfo"]

_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

MAX_F32 = float(np.finfo(np.float32).max)  # devices compute in f32

T = TypeVar("T")


class _Required:
    """The type of REQUIRED."""


REQUIRED = _Required()


# ---- metadata ----


class Metadata(Mapping[str, Any]):
    """A file's metadata. Access decodes a value to an int, float, bool, str, list[str] or numpy array."""

    def __init__(self, part: Part) -> None:
        self._path, self._buf, self._values = part.path, part.header, part.values

    def __getitem__(self, key: str) -> Any:
        v = self._values[key]
        if v.type == STRING:
            strings = self._strings(key, v)
            return strings if v.is_array else strings[0]
        dtype = np.dtype("<" + SCALARS[v.type][1])
        array = np.frombuffer(self._buf, dtype, v.count, v.start).copy()
        if v.type == BOOL:
            array = array != 0
        return array if v.is_array else array[0].item()

    def __contains__(self, key: object) -> bool:  # Mapping's method would decode the value.
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def describe(self, key: str) -> str:
        return self._values[key].describe()

    def kind(self, key: str) -> tuple[int, bool]:
        """Return the GGUF type id of a value or an array's elements, and whether the value is an array."""
        return self._values[key].type, self._values[key].is_array

    def stored(self, key: str) -> bytes:
        """Return a value's bytes in the file: its type, an array's length, and its data."""
        v = self._values[key]
        head = struct.pack("<IIQ", ARRAY, v.type, v.count) if v.is_array else struct.pack("<I", v.type)
        return head + bytes(self._buf[v.start : v.stop])

    def _strings(self, key: str, v: Value) -> list[str]:
        raw, pos, out = bytes(self._buf[v.start : v.stop]), 0, list[str]()
        unpack, append = U64.unpack_from, out.append
        try:
            for _ in range(v.count):
                start = pos + 8
                pos = start + unpack(raw, pos)[0]
                append(raw[start:pos].decode())
        except UnicodeDecodeError as e:
            where = f"element {len(out)} of {key!r}" if v.is_array else repr(key)
            raise GGUFError(f"{self._path}: {where} is not UTF-8: {e.object[:64]!r}") from e
        return out


# ---- the model file ----


class GGUF:
    """A GGUF model of one file or several parts. Its context manager unmaps the files.

    `metadata` is the metadata of the first part; `tensors` lists the tensors of all parts in file order.
    """

    mapped = True
    stated: Mapping[str, Any] = MappingProxyType({})  # key -> a value that replaces the file's
    with_heads = False  # Whether a model includes the file's multi-token prediction (MTP) heads.
    draft_head: Self | None = None  # An EAGLE-3 file, whose layer the model includes.

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        self.paths = [p.path for p in parts]
        self.metadata = Metadata(parts[0])
        self.tensors = {t.name: t for p in parts for t in p.tensors}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a file, or a split model by any of its parts. All parts are checked.

        Raises GGUFError if a file is missing, truncated or malformed, or if the parts do not match. Raises
        UnsupportedModel for an unknown tensor type.
        """
        paths = _part_paths(Path(path))
        parts: list[Part] = []
        try:
            for i, p in enumerate(paths):
                parts.append(parse(p, i))
            _check_split(parts)
            return cls(parts)
        except BaseException:
            for part in parts:
                part.buf.close()
            raise

    def attach(self, other: Self, names: Mapping[str, str]) -> None:
        """Add tensors of another open file. Closing this file also closes the other file. `names` maps their
        names to new names."""
        first, self.draft_head = len(self._parts), other
        self._parts, self.paths = self._parts + other._parts, self.paths + other.paths
        for old, new in names.items():
            info = other.tensors[old]
            self.tensors[new] = replace(info, name=new, file=first + info.file)

    @property
    def architecture(self) -> str:
        return self.string("general.architecture")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files. A file stays mapped until all views of its bytes (`data`) are freed."""
        for part in self._parts:
            try:
                part.buf.close()
            except BufferError:  # The last view frees the map.
                pass
        self._parts = []

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Return a tensor's bytes as uint8 [nbytes], a read-only view of the map."""
        if (t := self.tensors.get(name)) is None:
            raise GGUFError(f"{self.paths[0]}: no tensor {name!r}")
        if not self._parts:
            raise GGUFError(f"{self.paths[0]}: tensor {name!r} was read after close()")
        return np.frombuffer(self._parts[t.file].buf, np.uint8, t.nbytes, t.offset)

    def file(self, index: int) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._parts[index].buf, np.uint8)

    # ---- typed reads ----

    def get(self, key: str, default: Any = REQUIRED) -> Any:
        return self._read(key, default, "a value", None, None)

    def u32(self, key: str, default: T | _Required = REQUIRED) -> int | T:
        """Read an integer of any type whose value fits 32 unsigned bits."""
        value = self._read(key, default, "an integer in 0..4294967295", INTEGERS, False)
        if key in self.metadata and not 0 <= value < 1 << 32:
            raise GGUFError(f"{self.paths[0]}: {key!r} is {value}, expected an integer in 0..4294967295")
        return value

    def f32(self, key: str, default: T | _Required = REQUIRED) -> float | T:
        """Read a finite f32, or an f64 in the range of f32."""
        value = self._read(key, default, "a finite float", FLOATS, False)
        if key in self.metadata and not abs(value) <= MAX_F32:
            raise GGUFError(f"{self.paths[0]}: {key!r} is {value}, expected a finite f32")
        return value

    def boolean(self, key: str, default: T | _Required = REQUIRED) -> bool | T:
        return self._read(key, default, "a bool", {BOOL}, False)

    def string(self, key: str, default: T | _Required = REQUIRED) -> str | T:
        return self._read(key, default, "a string", {STRING}, False)

    def strings(self, key: str, default: T | _Required = REQUIRED) -> list[str] | T:
        return self._read(key, default, "an array of strings", {STRING}, True)

    def ints(self, key: str, default: T | _Required = REQUIRED) -> npt.NDArray[np.integer[Any]] | T:
        return self._read(key, default, "an array of integers", INTEGERS, True)

    def flags(self, key: str, default: T | _Required = REQUIRED) -> npt.NDArray[Any] | T:
        return self._read(key, default, "an array of bools or integers", {BOOL, *INTEGERS}, True)

    def floats(self, key: str, default: T | _Required = REQUIRED) -> npt.NDArray[np.floating[Any]] | T:
        return self._read(key, default, "an array of floats", FLOATS, True)

    def _read(
        self,
        key: str,
        default: Any,
        expected: str,
        types: frozenset[int] | set[int] | None,
        is_array: bool | None,
    ) -> Any:
        if key in self.stated:
            return self.stated[key]
        if key not in self.metadata:
            if default is REQUIRED:
                raise GGUFError(f"{self.paths[0]}: the metadata key {key!r} is missing, expected {expected}")
            return default
        if not self._parts:
            raise GGUFError(f"{self.paths[0]}: {key!r} was read after close()")
        found_type, found_array = self.metadata.kind(key)
        if types is not None and (found_type not in types or found_array != is_array):
            raise GGUFError(f"{self.paths[0]}: {key!r} is {self.metadata.describe(key)}, expected {expected}")
        return self.metadata[key]


# ---- split models ----


def _part_paths(path: Path) -> list[Path]:
    """Raises GGUFError with the paths of missing parts."""
    if (m := _SPLIT_NAME.fullmatch(path.name)) is None:
        return [path]
    count = int(m["count"])
    if not 1 <= int(m["no"]) <= count:
        raise GGUFError(f"{path}: impossible part {int(m['no'])} of {count}; check the file name")
    paths = [path.with_name(f"{m['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    if missing := [p for p in paths if not os.path.lexists(p)]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        names = ", ".join(p.name for p in missing[:3])
        raise GGUFError(
            f"{path}: {len(missing)} of {count} parts are missing: {names}{more}; put them in the same folder"
        )
    return paths


def _check_split(parts: list[Part]) -> None:
    """Check that split.no, split.count and split.tensors.count match the files, and that no tensor is in two
    files."""
    total, seen = sum(len(p.tensors) for p in parts), dict[str, Path]()
    for i, part in enumerate(parts):
        meta = Metadata(part)
        required = len(parts) > 1
        for key, actual in (("split.count", len(parts)), ("split.no", i), ("split.tensors.count", total)):
            if key not in meta:
                if required:
                    raise GGUFError(
                        f"{part.path}: the name is for a part of a split model, but {key!r} is missing"
                    )
                continue
            kind, is_array = meta.kind(key)
            if is_array or kind not in INTEGERS:
                raise GGUFError(f"{part.path}: {key!r} is {meta.describe(key)}, expected an integer")
            stated = meta[key]
            # Some tools write split.count = 0 into a file that is not split.
            lone = key == "split.count" and not required and stated == 0
            if stated != actual and not lone:
                raise GGUFError(
                    f"{part.path}: {key!r} is {stated}, but by the files it is {actual}; "
                    "name the parts NAME-00001-of-0000N.gguf and take all of them from one conversion"
                )
        for t in part.tensors:
            if (other := seen.setdefault(t.name, part.path)) is not part.path:
                raise GGUFError(f"{part.path}: tensor {t.name!r} is also in {other}")
