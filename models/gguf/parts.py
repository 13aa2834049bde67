"""Splits GGUF models into files and joins them, like llama.cpp's gguf-split."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from vkbackend.atomic_file import replacing
from vkbackend.errors import GGUFError, InvalidArgument
from vkbackend.models.gguf.header import DEFAULT_ALIGNMENT, TensorInfo
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.gguf.writer import header, padded

MAX_PARTS = 65_535  # The key split.count is a u16.
PIECE_NBYTES = 16 << 20  # Bytes per write.
_U16, _I32 = 2, 5  # GGUF type ids.

Progress = Callable[[int, int], None]  # bytes written, total bytes


def cut(
    tensors: Iterable[TensorInfo], *, max_tensors: int = 0, max_nbytes: int = 0, first_without: bool = False
) -> list[list[TensorInfo]]:
    """Group the tensors, in order, into parts of at most `max_tensors`. If `max_tensors` is 0, a part has at
    most `max_nbytes` bytes, and a larger tensor gets a separate part. If `first_without`, the first part has
    only metadata."""
    parts: list[list[TensorInfo]] = [[]]
    nbytes = 0
    for info in tensors:
        full = len(parts[-1]) >= max_tensors if max_tensors else nbytes + info.nbytes > max_nbytes
        if (parts[-1] and full) or (first_without and len(parts) == 1):
            parts.append([])
            nbytes = 0
        parts[-1].append(info)
        nbytes += info.nbytes
    return parts


def part_paths(prefix: str | os.PathLike[str], count: int) -> list[Path]:
    """Return the paths of the parts, PREFIX-00001-of-0000N.gguf to PREFIX-0000N-of-0000N.gguf, as in
    llama.cpp."""
    if count > MAX_PARTS:
        raise InvalidArgument(
            f"{count} parts, but a split model has at most {MAX_PARTS}; make the parts larger"
        )
    name = os.fspath(prefix)
    return [Path(f"{name}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]


def split_gguf(
    source: GGUF,
    prefix: str | os.PathLike[str],
    parts: Sequence[Sequence[TensorInfo]],
    progress: Progress | None = None,
) -> list[Path]:
    """Write one file per part (see `cut`), and return the paths. The first file contains the metadata. Raises
    InvalidArgument if an output path is one of the source files, and GGUFError if writing fails. After an
    error no part remains.
    """
    paths, n_tensors = part_paths(prefix, len(parts)), len(source.tensors)
    metadata = _whole(source)
    files = []
    for i, (path, part) in enumerate(zip(paths, parts, strict=True)):
        values = {
            "split.no": struct.pack("<IH", _U16, i),
            "split.count": struct.pack("<IH", _U16, len(parts)),
            "split.tensors.count": struct.pack("<Ii", _I32, n_tensors),
        }
        files.append((path, metadata | values if i == 0 else values, part))
    _write(source, files, progress)
    return paths


def merge_gguf(source: GGUF, path: str | os.PathLike[str], progress: Progress | None = None) -> None:
    """Write the model as one file. Raises InvalidArgument if `path` is one of the source files, and GGUFError
    if writing fails. An error leaves `path` unchanged."""
    _write(source, [(Path(path), _whole(source), list(source.tensors.values()))], progress)


def _whole(source: GGUF) -> dict[str, bytes]:
    return {key: source.metadata.stored(key) for key in source.metadata if not key.startswith("split.")}


def _write(
    source: GGUF,
    files: Sequence[tuple[Path, Mapping[str, bytes], Sequence[TensorInfo]]],
    progress: Progress | None,
) -> None:
    for path, _, _ in files:
        if os.path.exists(path) and any(os.path.samefile(path, existing) for existing in source.paths):
            raise InvalidArgument(f"{path} is a file of the source model; give another name")
    stated = source.u32("general.alignment", DEFAULT_ALIGNMENT)
    total, done = sum(info.nbytes for info in source.tensors.values()), 0
    with ExitStack() as whole:
        for path, values, tensors in files:
            alignment = stated if "general.alignment" in values else DEFAULT_ALIGNMENT
            with open(whole.enter_context(replacing(path, GGUFError)), "wb") as file:
                file.write(header(values, tensors, alignment))
                for info in tensors:
                    data = source.data(info.name)
                    for at in range(0, info.nbytes, PIECE_NBYTES):
                        done += file.write(data[at : at + PIECE_NBYTES].data)
                        if progress:
                            progress(done, total)
                    file.write(bytes(padded(info.nbytes, alignment) - info.nbytes))
