"""Stores a checksum of each tensor of a saved state in the file's metadata (docs/state_format.md).

A checksum covers the tensor's name, type, shape and bytes, and the other metadata. Swapped tensors are
therefore detected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vkbackend.errors import StateError
from vkbackend.meta.gather import PIECE_NBYTES

_PREFIX = "sha256_"  # followed by the tensor's name


def checksums(metadata: Mapping[str, str], tensors: Mapping[str, tuple[str, np.ndarray]]) -> dict[str, str]:
    """Return metadata entries. `tensors` maps names to (type in the file, array)."""
    return {
        _PREFIX + name: _digest(metadata, name, dtype, array.shape, [array])
        for name, (dtype, array) in tensors.items()
    }


def check(file: Any, path: Any) -> bool:
    """Check all tensors. Return False for files of earlier versions, which have no checksums. Raises
    StateError if a checksum is wrong or missing."""
    metadata = file.metadata() or {}
    expected = {
        key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)
    }
    if not expected:
        return False
    names = set(file.keys())
    for name in sorted(names | set(expected)):
        if name not in names & set(expected):
            raise StateError(f"{path}: {name!r} and its checksum are not both there; the file is damaged")
        entry = file.get_slice(name)
        shape = entry.get_shape()
        if expected[name] != _digest(metadata, name, entry.get_dtype(), shape, _pieces(entry, shape)):
            raise StateError(
                f"{path}: {name} does not match its checksum; the file is damaged, save the state again"
            )
    return True


def _digest(
    metadata: Mapping[str, str], name: str, dtype: str, shape: Sequence[int], pieces: Iterable[np.ndarray]
) -> str:
    digest = hashlib.sha256()
    for key in sorted(metadata):
        if not key.startswith(_PREFIX):
            digest.update(f"{key}\0{metadata[key]}\0".encode())
    digest.update(f"{name}\0{dtype}\0{','.join(map(str, shape))}\0".encode())
    for piece in pieces:
        digest.update(np.ascontiguousarray(piece).view(np.uint8).data)
    return digest.hexdigest()


def _pieces(entry: Any, shape: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield pieces of a few MiB, so that no state is in memory twice."""
    step = max(1, PIECE_NBYTES // (8 * max(1, int(np.prod(shape[1:])))))
    for begin in range(0, shape[0], step):
        yield entry[begin : min(begin + step, shape[0])]
