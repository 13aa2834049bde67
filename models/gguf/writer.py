"""Encodes the header of a GGUF file, version 3 (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from vkbackend.models.gguf.header import TENSOR_TYPES, TensorInfo

_TYPE_IDS = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}


def header(values: Mapping[str, bytes], tensors: Iterable[TensorInfo], alignment: int) -> bytes:
    """Return the magic, counts, metadata and tensor table, padded to `alignment`. `values` are encoded as by
    Metadata.stored. The data must follow in the order of `tensors`."""
    table = list(tensors)
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(table), len(values)))
    for key, stored in values.items():
        out += _string(key) + stored
    offset = 0
    for info in table:
        dims = tuple(reversed(info.shape))
        out += _string(info.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        out += struct.pack("<IQ", _TYPE_IDS[info.type], offset)
        offset += padded(info.nbytes, alignment)
    return bytes(out) + bytes(-len(out) % alignment)


def padded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw
