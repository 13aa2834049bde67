"""Predicts the speed of a mixture whose experts are in host memory, with and without a cache of the most used
experts. Also predicts the speed if the CPU computed the experts.

A token reads the bytes of its experts over the bus, and everything else from device memory. An expert in the
cache is read from device memory. The CPU would read all experts from RAM. Attention over the context and the
router are not counted.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vkbackend.meta.balance import Cost, Times, times
from vkbackend.meta.known_speed import Speed
from vkbackend.models.architectures.base import Model
from vkbackend.models.placement.expert_use import Used, experts_read, hit_rate, tiles_read
from vkbackend.models.placement.layout import Layout, slot_nbytes_of, weight_nbytes

# Bytes per second of expert weights that a CPU reads from two memory channels. The channels deliver at most
# 51 GB/s (DDR4-3200) and 96 GB/s (DDR5-6000).
RAM = {"DDR4": 40e9, "DDR5": 70e9}


@dataclass(frozen=True, slots=True)
class CacheRow:
    """`nbytes` of device memory hold `n_slots` experts per layer. `bus` is the number of bytes that the
    busiest device reads over its bus for a token."""

    nbytes: int
    n_slots: int
    hit_rate: float
    bus: float
    times: Times
    cpu_ms: dict[str, float]  # by kind of RAM


@dataclass(frozen=True, slots=True)
class StepRow:
    """Steps of `n_rows` tokens of a prompt. `bus` is the number of bytes that the busiest device reads per
    token, without and with the cache. `at_most` is the tokens per second that the bus allows (None: no
    limit). Both values assume that a step reads an expert once. `bus_of_tiles` and `at_most_of_tiles` are
    without an expert cache. They assume that every tile of pairs reads its expert over the bus, because the
    GPU does not cache host memory."""

    n_rows: int
    scratch: int
    bus: tuple[float, float]
    at_most: tuple[float | None, float | None]
    bus_of_tiles: float
    at_most_of_tiles: float | None


@dataclass(frozen=True)
class MixturePlan:
    """`used` has a row per layer with experts in host memory (expert_use.py). Its rows are in the order of
    `layout.stacks`. `cost` is a token's cost without a cache."""

    model: Model
    layout: Layout
    cost: Cost
    speeds: Sequence[Speed]
    resources: Sequence[Hashable]
    reduce_ms: float
    used: Sequence[Used]

    @property
    def n_experts(self) -> int:
        return max(len(used) for used in self.used)

    @property
    def slot_nbytes(self) -> int:
        """Return the number of bytes of an expert of each layer, on all devices together."""
        return slot_nbytes_of(self.layout.stacks, self.layout.n_devices)

    def with_cache(self, n_slots: int) -> CacheRow:
        rates = [hit_rate(used, n_slots) for used in self.used]
        hits = [sum(stack[d] * rates[il] for il, stack in self._stacks()) for d in self._devices]
        host = tuple(round(n - hit) for n, hit in zip(self.cost.host, hits, strict=True))
        read = tuple(round(n + hit) for n, hit in zip(self.cost.read, hits, strict=True))
        in_stacks = sum(sum(stack) for _, stack in self._stacks())
        missed = in_stacks - sum(hits)
        taken = self._times(host, read)
        rest = self._times(tuple(0 for _ in host), read)
        other_host = sum(host) - missed  # tensors that are not experts
        cpu = {
            kind: rest.total_ms + 1e3 * missed / rate + 1e3 * other_host / min(s.host for s in self.speeds)
            for kind, rate in RAM.items()
        }
        share = float(np.mean(rates))
        return CacheRow(n_slots * self.slot_nbytes, n_slots, share, max(host), taken, cpu)

    def steps(self, n_rows: int, n_slots: int, scratch: int, tile: int) -> StepRow:
        """`tile` is the maximum number of (row, expert) pairs of a tile."""
        without, cached = (
            self._bus_of_step(n_rows, [experts_read(used, n_rows, slots) for used in self.used])
            for slots in (0, n_slots)
        )
        tiles = self._bus_of_step(n_rows, [tiles_read(used, n_rows, tile) for used in self.used])
        return StepRow(
            n_rows,
            scratch,
            (max(without), max(cached)),
            (self._at_most(without), self._at_most(cached)),
            max(tiles),
            self._at_most(tiles),
        )

    def _at_most(self, bus: Sequence[float]) -> float | None:
        rates = (of.host / n for n, of in zip(bus, self.speeds, strict=True) if n > 1e-9)
        return min(rates, default=None)

    def _bus_of_step(self, n_rows: int, n_read: Sequence[float]) -> list[float]:
        """Return the bytes that each device reads over its bus per row of a step that reads `n_read` experts
        of each layer. Matrices that are not experts are read once."""
        experts = [0.0 for _ in self._devices]
        for il, stack in self._stacks():
            part = n_read[il] / self.model.n_used
            experts = [n + of * part for n, of in zip(experts, stack, strict=True)]
        in_stacks = [sum(stack[d] for _, stack in self._stacks()) for d in self._devices]
        others = [host - n for host, n in zip(self.cost.host, in_stacks, strict=True)]
        return [(n + other) / n_rows for n, other in zip(experts, others, strict=True)]

    @property
    def _devices(self) -> range:
        return range(self.layout.n_devices)

    def _stacks(self) -> list[tuple[int, list[float]]]:
        """Return (index of the layer, bytes of a token's experts on each device)."""
        return [
            (
                il,
                [
                    sum(weight_nbytes(load, d) * self.model.n_used / load.shape[0] for load in loads)
                    for d in self._devices
                ],
            )
            for il, loads in enumerate(self.layout.stacks.values())
        ]

    def _times(self, host: tuple[int, ...], read: tuple[int, ...]) -> Times:
        changed = replace(self.cost, host=host, read=read, reduces=(), inner=())
        taken = times(changed, self.speeds, self.resources, lambda nbytes: 0.0)
        return replace(taken, reduce_ms=self.reduce_ms)
