"""Builds well-formed and damaged GGUF files byte by byte."""

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vkbackend.models.gguf.header import TENSOR_TYPES
from vkbackend.models.gguf.reader import GGUF

U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
_CODES = {
    0: "B", 1: "b", 2: "H", 3: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"
}  # fmt: skip


def string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def payload(kind: int, value: Any) -> bytes:
    return string(value) if kind == STRING else struct.pack("<" + _CODES[kind], value)


def key(name: str | bytes, kind: int, value: Any) -> bytes:
    return string(name) + struct.pack("<I", kind) + payload(kind, value)


def array(name: str, kind: int, values: Sequence[Any]) -> bytes:
    body = b"".join(payload(kind, v) for v in values)
    return string(name) + struct.pack("<IIQ", ARRAY, kind, len(values)) + body


def tensor(name: str, dims: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_bytes(
    keys: Iterable[bytes] = (),
    tensors: Iterable[bytes] = (),
    data: bytes = b"",
    version: int = 3,
    align: int = 32,
) -> bytes:
    keys, tensors = list(keys), list(tensors)
    head = (
        b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    )
    return head + bytes(-len(head) % align) + data


def with_keys(source: GGUF, changed: Mapping[str, bytes]) -> bytes:
    """Return the bytes of a GGUF file with changed values. `changed` maps names to a value's type, array
    length and bytes."""
    keys = [string(name) + source.metadata.stored(name) for name in source.metadata if name not in changed]
    keys += [string(name) + value for name, value in changed.items()]
    kinds = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}
    start = min((info.offset for info in source.tensors.values()), default=0)
    table = [
        tensor(name, info.shape[::-1], kinds[info.type], info.offset - start)
        for name, info in source.tensors.items()
    ]
    return gguf_bytes(keys, table, source.file(0)[start:].tobytes() if table else b"")


def vocabulary(
    model: str,
    tokens: Sequence[str | bytes],
    *,
    types: Sequence[int] | None = None,
    extra: Iterable[bytes] = (),
) -> bytes:
    keys = [
        key("general.architecture", STRING, "llama"),
        key("tokenizer.ggml.model", STRING, model),
        array("tokenizer.ggml.tokens", STRING, tokens),
    ]
    if types is not None:
        keys.append(array("tokenizer.ggml.token_type", I32, types))
    return gguf_bytes([*keys, *extra])
