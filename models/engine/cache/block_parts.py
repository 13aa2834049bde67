"""Copies blocks between the devices and the host. On the host, heads are in the model's order
(docs/state_format.md), so any devices can load a block.

A block has one part per layer group, with K, V and index keys of the group's layers. Its last part is the
recurrent state after the block's positions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np

from vkbackend.meta.gather import gather_many, matrix_of, scatter_many
from vkbackend.meta.mesh import Mesh
from vkbackend.meta.tensor import Weight
from vkbackend.models.options import Options
from vkbackend.models.placement.cache_plan import layout_of
from vkbackend.models.placement.kv_cache import KVCache
from vkbackend.rope import RopeTable

Cell = tuple[int, int]  # (part, index of its block or of its state's cell)


class Parts(Protocol):
    """`nbytes` lists the bytes of each part. The last part is the recurrent state, of 0 bytes without one.
    `identity` is a SHA-256 of everything on which K and V depend, except tokens and adapters."""

    identity: bytes
    nbytes: tuple[int, ...]

    def read(self, cells: Sequence[Cell]) -> list[bytes]: ...

    def write(self, cells: Sequence[tuple[Cell, bytes]]) -> None: ...


class BlockParts:
    def __init__(self, mesh: Mesh, kv: KVCache, identity: bytes) -> None:
        self._mesh, self.identity = mesh, identity
        self._arrays: list[list[tuple[Weight, int, int]]] = [  # (array, rows of a block, first row)
            [(part.array, part.n_cells, part.first) for part in kv.parts if part.table is table]
            for table in kv.groups
        ]
        states = kv.states.layers.values()
        self._arrays.append([(w, 1, 0) for state in states for w in state.arrays.values()])
        self._ends = [
            [0, *accumulate(rows * matrix_of(weight)[1] for weight, rows, _ in arrays)]
            for arrays in self._arrays
        ]
        self.nbytes = tuple(ends[-1] for ends in self._ends)

    def read(self, cells: Sequence[Cell]) -> list[bytes]:
        """Return each part's bytes. No step may be running. Raises the errors of devices."""
        self._mesh.check_usable()
        wanted = [
            (weight, first + n * cell, first + n * cell + n)
            for part, cell in cells
            for weight, n, first in self._arrays[part]
        ]
        rows = iter(gather_many(self._mesh.devices, wanted))
        return [b"".join(next(rows).data for _ in self._arrays[part]) for part, _ in cells]

    def write(self, cells: Sequence[tuple[Cell, bytes]]) -> None:
        """Write parts of the right size. No step may be running. Raises the errors of devices."""
        self._mesh.check_usable()
        rows: list[tuple[Weight, int, np.ndarray]] = []
        for (part, cell), data in cells:
            raw = np.frombuffer(data, np.uint8)
            assert raw.size == self.nbytes[part], (part, raw.size)
            ends = pairwise(self._ends[part])
            for (weight, n, first), (begin, end) in zip(self._arrays[part], ends, strict=True):
                rows.append((weight, first + n * cell, raw[begin:end].reshape(n, -1)))
        scatter_many(self._mesh.devices, rows)


def identity_of(fingerprint: str, options: Options, ropes: Mapping[str, RopeTable], n_layer: int) -> bytes:
    """Return the SHA-256 of the model's fingerprint, the types of the caches and the RoPE tables."""
    layout = " ".join(layout_of(options).values())
    digest = hashlib.sha256(f"{fingerprint} {layout} {n_layer}\0".encode())
    for name in sorted(ropes):
        for value in astuple(ropes[name]):
            shown = np.asarray(value, "<f8").tobytes() if np.ndim(value) else repr(value).encode()
            digest.update(name.encode() + b"\0" + shown + b"\0")
    return digest.digest()
