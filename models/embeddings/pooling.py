"""Pools the hidden states of a text's tokens to one vector, and normalises vectors."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from vkbackend.checks import refused, whole_number
from vkbackend.errors import VkbackendError
from vkbackend.models.engine.messages import Event

POOLINGS = ("none", "mean", "cls", "last", "rank")  # in the order of GGUF's `pooling_type`
MAX_NORM = 1 << 16
LARGEST = 32_760.0  # the largest magnitude with kind 0, as in llama.cpp

Rows = Literal["all", "first", "last"]
ROWS: dict[str, Rows] = {"none": "all", "mean": "all", "cls": "first", "last": "last"}


def pooling_of(name: str, value: Any) -> str:
    if value not in POOLINGS or not isinstance(value, str):
        raise refused(name, value, f"expected one of {', '.join(POOLINGS)}")
    return value


def norm_of(name: str, value: Any) -> int:
    kinds = " (-1: none, 0: by the largest magnitude, 1: taxicab, 2: Euclidean, more: p-norm)"
    return whole_number(name, value, -1, MAX_NORM, kinds)


def normalised(vectors: np.ndarray, kind: int) -> np.ndarray:
    """Return float32 vectors [..., n] divided by their norm, as `--embd-normalize` of llama.cpp.

    `kind` is -1 (unchanged), 0 (the largest magnitude becomes 32,760), 1 (sum of magnitudes), 2 (Euclidean)
    or p (p-norm). A vector of zeros is unchanged.
    """
    if kind < 0:
        return vectors.astype(np.float32)
    values = vectors.astype(np.float64)
    largest = np.abs(values).max(axis=-1, keepdims=True)
    if kind == 0:
        norm = largest / LARGEST
    else:
        # Magnitudes of at most 1 do not overflow when raised to a high power.
        scaled = np.divide(np.abs(values), largest, out=np.zeros_like(values), where=largest > 0)
        norm = largest * (scaled**kind).sum(axis=-1, keepdims=True) ** (1 / kind)
    return np.divide(values, norm, out=values, where=norm > 0).astype(np.float32)


class Pooled:
    """Collects the hidden states of a text, which arrive in several events. The result is the mean in
    float64, the only row, or all rows."""

    def __init__(self, pooling: str) -> None:
        self._mean, self._all = pooling == "mean", pooling == "none"
        self._sum: np.ndarray | None = None
        self._rows: list[np.ndarray] = []
        self._n = 0

    def push(self, event: Event) -> None:
        rows = event.hidden
        assert rows is not None
        if not np.isfinite(rows).all():
            raise VkbackendError(
                "the model computed hidden states that are not finite; use an F32 or BF16 file or cache"
            )
        self._n += len(rows)
        if self._mean:
            total = rows.sum(axis=0, dtype=np.float64)
            self._sum = total if self._sum is None else self._sum + total
        else:
            self._rows.append(rows)

    def result(self) -> np.ndarray:
        """Return float64 or float32 [n_embd], or [n_tokens, n_embd] for pooling none."""
        if self._sum is not None:
            return self._sum / self._n
        rows = np.concatenate(self._rows)
        return rows if self._all else rows[0]
