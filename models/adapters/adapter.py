"""A low-rank adapter (Hu et al. 2021, arXiv:2106.09685) has a pair of matrices A and B for each adapted
matrix W. The product y = W x becomes y = W x + scale * factor * B A x."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from vkbackend.errors import AdapterError

MAX_RANK = 1 << 14
MAX_FACTOR = 1e6  # A larger factor or scale turns rounding errors into noise.


@dataclass(frozen=True, slots=True)
class Pair:
    """`a` is float32 [rank, n_in] and `b` [n_out, rank], or for a stack of experts [n_expert, rank, n_in] and
    [n_expert, n_out, rank]. `dtype` is the file's type: f32, f16 or bf16. `factor` is alpha / rank, or 1."""

    a: np.ndarray
    b: np.ndarray
    dtype: str
    factor: float = 1.0

    @property
    def rank(self) -> int:
        return int(self.a.shape[-2])


@dataclass(frozen=True)
class Adapter:
    """`pairs` maps a GGUF tensor's name to its pair. `task_name` and `prompt_prefix` are texts from the file.
    If `invocation` has tokens, the adapter applies only from their last occurrence in the prompt (activated
    LoRA: Greenewald et al. 2025, arXiv:2504.12397)."""

    path: str
    pairs: Mapping[str, Pair]
    task_name: str = ""
    prompt_prefix: str = ""
    invocation: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        """Return the largest rank."""
        return max(pair.rank for pair in self.pairs.values())

    @property
    def nbytes(self) -> int:
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.pairs.values())

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of everything that changes results. The file's name and format are not included."""
        digest = hashlib.sha256(repr(self.invocation).encode())
        for name, pair in sorted(self.pairs.items()):
            digest.update(repr((name, pair.factor, pair.a.shape, pair.b.shape)).encode())
            digest.update(np.ascontiguousarray(pair.a).data)
            digest.update(np.ascontiguousarray(pair.b).data)
        return digest.hexdigest()


def check_file(path: Path) -> None:
    """Raise AdapterError unless the path is an existing regular file. Reading a pipe or a device may never
    end."""
    if not path.is_file():
        why = "is not a regular file" if path.exists() else "does not exist"
        raise AdapterError(f"{path} {why}; give a folder that PEFT saved")


def check_pair(path: str, name: str, pair: Pair) -> None:
    """Raise AdapterError unless A and B have the same rank, 1 to MAX_RANK, all values are finite, and the
    factor is at most MAX_FACTOR."""
    a, b = pair.a, pair.b
    matches = a.ndim == b.ndim in (2, 3) and a.shape[:-2] == b.shape[:-2] and a.shape[-2] == b.shape[-1]
    if not matches:
        raise AdapterError(
            f"{path}: {name}: A has shape {a.shape} and B {b.shape}; expected (rank, n_in) and (n_out, rank)"
        )
    if not 1 <= pair.rank <= MAX_RANK or 0 in (*a.shape, *b.shape):
        raise AdapterError(f"{path}: {name}: rank {pair.rank}, expected 1..{MAX_RANK}; the file is damaged")
    if not (math.isfinite(pair.factor) and abs(pair.factor) <= MAX_FACTOR):
        raise AdapterError(
            f"{path}: {name}: alpha / rank is {pair.factor:g}, expected at most {MAX_FACTOR:g}; the file is "
            "damaged"
        )
    for half, values in (("A", a), ("B", b)):
        if not np.isfinite(values).all():
            raise AdapterError(f"{path}: {name}: {half} has NaN or infinity; the file is damaged")
