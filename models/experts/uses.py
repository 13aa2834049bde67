"""Counts how often the router uses each expert.

The cache folder stores the counts by the model's fingerprint, so that the next start begins with the most
used experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from vkbackend import cache_folder

_FORMAT = 1
HALF_LIFE = 4096.0  # rows


class Uses:
    """Each expert's uses. A use counts half after `half_life` rows. `of_layers` are views of `flat`, float64
    [experts of all layers]."""

    def __init__(self, names: Sequence[str], n_experts: Sequence[int], half_life: float = HALF_LIFE) -> None:
        self.names, self.half_life = list(names), half_life
        self.flat = np.zeros(sum(n_experts))
        self.firsts = np.cumsum([0, *n_experts[:-1]])  # index of each layer's first expert in `flat`
        self.of_layers = np.split(self.flat, self.firsts[1:])

    def add(self, counts: np.ndarray, n_rows: int) -> None:
        """Add the counts of `n_rows` rows, a number per expert of all layers."""
        self.flat *= 0.5 ** (n_rows / self.half_life)
        self.flat += counts

    def load(self, fingerprint: str) -> bool:
        """Replace the counts by the stored counts of a model. Return False if no counts are stored."""
        stored = cache_folder.read_json(entry_name(fingerprint))
        try:
            layers = stored["layers"] if stored["format"] == _FORMAT else {}
            every = [np.asarray(layers[name], np.float64) for name in self.names]
        except (KeyError, TypeError, ValueError, OverflowError):
            return False
        for values, held in zip(every, self.of_layers, strict=True):
            if values.shape != held.shape or not np.isfinite(values).all() or (values < 0).any():
                return False
        self.flat[:] = np.concatenate(every)
        return bool(self.flat.any())

    def save(self, fingerprint: str) -> bool:
        """Store the counts. Return False if the cache folder is not writable."""
        layers = {
            name: [round(float(n), 2) for n in held]
            for name, held in zip(self.names, self.of_layers, strict=True)
        }
        return cache_folder.write_json(entry_name(fingerprint), {"format": _FORMAT, "layers": layers})


def entry_name(fingerprint: str) -> str:
    return f"experts-{hashlib.sha256(fingerprint.encode()).hexdigest()[:16]}.json"
