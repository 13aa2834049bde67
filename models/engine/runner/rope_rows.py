from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vkbackend.models.engine.runner.micro_batch import BatchImages
from vkbackend.rope import RopeTable

CACHE_NBYTES = 64 << 20  # up to this size, tables contain all positions


class RopeRows:
    def __init__(self, ropes: Mapping[str, RopeTable], n_ctx: int, n_rows: int) -> None:
        self._ropes = ropes
        self._rows = {name: np.zeros((n_rows, t.n_rot // 2, 2), np.float32) for name, t in ropes.items()}
        self._all = {
            name: t.rows(np.arange(n_ctx)) if 4 * t.n_rot * n_ctx <= CACHE_NBYTES else None
            for name, t in ropes.items()
        }

    def at(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Return rows of cos and sin by table, float32 [n_positions, n_rot / 2, 2], which the next call
        overwrites."""
        rope: dict[str, np.ndarray] = {}
        for name, table in self._rows.items():
            every, rope[name] = self._all[name], table[: len(positions)]
            rope[name][:] = every[positions] if every is not None else self._ropes[name].rows(positions)
        return rope

    def of_images(self, images: BatchImages | None) -> dict[str, np.ndarray] | None:
        """Like `at`, but for the RoPE positions of a step with images. Return None if these positions equal
        the cells."""
        if images is None or images.positions is None:
            return None
        return {name: table.rows(images.positions) for name, table in self._ropes.items()}
