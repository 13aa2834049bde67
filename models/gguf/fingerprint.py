"""Hashes the properties of a model that determine K and V."""

from __future__ import annotations

import hashlib

import numpy as np

from vkbackend.models.gguf.reader import GGUF

SAMPLE_NBYTES = 256  # of each tensor


def fingerprint(gguf: GGUF) -> str:
    """Return the SHA-256 of the hyper-parameters and of every tensor's name, type, shape and first bytes.
    Copies and splits of a file have the same hash."""
    digest = hashlib.sha256(gguf.architecture.encode())
    for key in sorted(k for k in gguf.metadata if k.startswith(f"{gguf.architecture}.")):
        value = gguf.metadata[key]
        digest.update(repr((key, value.tolist() if isinstance(value, np.ndarray) else value)).encode())
    if gguf.stated:
        digest.update(repr(sorted(gguf.stated.items())).encode())
    if gguf.with_heads:
        digest.update(b"heads")
    if gguf.draft_head:
        digest.update(fingerprint(gguf.draft_head).encode())
    for name, info in sorted(gguf.tensors.items()):
        digest.update(repr((name, info.type, info.shape)).encode())
        digest.update(gguf.data(name)[:SAMPLE_NBYTES].tobytes())
    return digest.hexdigest()
