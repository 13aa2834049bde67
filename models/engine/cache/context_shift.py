"""Moves cached positions of a sequence down, after positions before them were discarded.

A recorded step moves up to `n_rows` positions in every layer. The step reads keys and values, rotates the
keys by the distance, and writes both to the cells of the new positions. Positions move in ascending order, so
each position is read before it is overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vkbackend.buffer import Virtual
from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.mesh import Mesh
from vkbackend.meta.step_kind import StepKind
from vkbackend.models.architectures.memory_specs import KeyRotation
from vkbackend.models.placement.kv_cache import KVCache
from vkbackend.rope import RopeTable
from vkbackend.step import Mix, Run, StepParams


class ContextShift:
    """`rotations` maps each cache to the RoPE of its keys. The step is recorded immediately and uses the
    memory of the model's steps, so a shift allocates nothing."""

    def __init__(
        self,
        mesh: Mesh,
        kv: KVCache,
        rotations: Mapping[int, KeyRotation | None],
        ropes: Mapping[str, RopeTable],
        n_rows: int,
    ) -> None:
        self._mesh, self._kv, self._rotations, self._n_rows = mesh, kv, rotations, n_rows
        used = {rotation.table for rotation in rotations.values() if rotation}
        self._ropes = {name: table for name, table in ropes.items() if name in used}
        self._params = StepParams()
        self._step = mesh.record(StepKind.of_run(n_rows, 0), self._build)

    def _build(self, graph: Graph) -> None:
        arrays = [array for cache in self._kv.own.values() for array in (cache.k, cache.v)]
        widest = [
            max((array.whole(d).shape[1] for array in arrays if array.pieces[d]), default=0)
            for d in range(graph.n)
        ]
        # K and V of all layers share two arrays, so the layers' copies are ordered one after another.
        moved = [
            [Virtual(4 * graph.n_rows * width, f"moved {name}") for width in widest] for name in ("k", "v")
        ]
        for plan in self._kv.plans:
            cache, rotation = self._kv.own[plan.layer], self._rotations[plan.layer]
            with graph.scope(f"blk.{plan.layer}"):
                rope = (rotation.table, rotation.half_split) if rotation else None
                ops.kv_move(graph, cache.k, cache.cells, moved[0], plan.spec.head_dim_k, rope)
                ops.kv_move(graph, cache.v, cache.cells, moved[1], plan.spec.head_dim_v)

    @property
    def widths(self) -> dict[str, int]:
        return {name: table.n_rot for name, table in self._ropes.items()}

    def cos_sin(self, distance: int) -> dict[str, np.ndarray]:
        """Return cos and sin that move keys down by `distance`, by table, float32 [n_rot / 2, 2]."""
        return {name: table.rotation(-distance) for name, table in self._ropes.items()}

    def run(self, slot: int, first: int, end: int, distance: int, cos_sin: Mapping[str, np.ndarray]) -> None:
        """Move positions `first` to `end` - 1 of the slot down by `distance`. Raises device errors."""
        assert 0 < distance <= first <= end, (first, end, distance)
        rows = {name: np.tile(row, (self._n_rows, 1, 1)) for name, row in cos_sin.items()}
        for begin in range(first, end, self._n_rows):
            n = min(self._n_rows, end - begin)
            run = Run(slot, 0, n, begin - distance)
            self._params.fill(np.arange(begin, begin + n), [run], [], Mix.PREFILL)
            self._mesh.write_step(self._params, rows)
            self._mesh.run(self._step)
