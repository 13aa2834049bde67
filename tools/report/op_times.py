"""Parts that time ops, to rank them as `vkbackend tune` does and to compare them with the copy rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from vkbackend.meta.speed import measure_copy
from vkbackend.ops import measured
from vkbackend.ops.choice import runs
from vkbackend.ops.matrix import ROW_CLASSES
from vkbackend.ops.table import MATRIX_OPS
from vkbackend.tools.measure import matrix_times
from vkbackend.tools.measure.case_times import Row as TimedRow
from vkbackend.tools.measure.case_times import time_case
from vkbackend.tools.op_cases.attention import bench as attention_cases
from vkbackend.tools.op_cases.caches import bench as cache_cases
from vkbackend.tools.op_cases.moe import bench as expert_cases
from vkbackend.tools.op_cases.quantized import bench as quantized_cases
from vkbackend.tools.op_cases.setup import Case
from vkbackend.tools.report.part import LeftOut, Part, Row

RANKING = "ranking"


class Tune(Part):
    """Ranks ops. Later parts use the ranking, which is stored in the report's cache folder."""

    title = "Which op multiplies matrices fastest (`tune`)"
    share, deadline_s = 0.1, 60.0

    @cached_property
    def _named(self) -> dict[str, Case]:
        return {repr(case): case for case in matrix_times.cases_of(self.device.limits)}

    def cases(self) -> list[str]:
        return [*self._named, RANKING]

    def run(self, case: str) -> list[Row]:
        if case != RANKING:
            return [{"case": case, "us": matrix_times.time_of(self.device, self._named[case])}]
        known = {row["case"]: row["us"] for row in self.rows if "us" in row}
        if missing := set(self._named) - set(known):
            raise LeftOut(f"{len(missing)} of the cases it needs have no time")
        limits, info = self.device.limits, self.device.physical
        times = matrix_times.times_by(limits, lambda timed_case: known[repr(timed_case)])
        ranking = matrix_times.ranked([times], replace(limits, choices=()))
        if info:
            measured.save(info, ranking)
        return [
            {"rows": rows, "op": op, **{kind: times[rows][op].get(kind) for kind in matrix_times.TYPES}}
            for rows, ops in ranking.items()
            for op in ops
        ]

    @classmethod
    def columns(cls, rows: Sequence[Row]) -> tuple[Sequence[str], list[Sequence[object]]]:
        head = ("device", "rows", "op", *matrix_times.TYPES)
        return head, [[row.get(name) or "" for name in head] for row in rows if "op" in row]


TYPES = ("q4_0", "q4_k", "q8_0", "q6_k", "f16", "mxfp4", "iq4_xs")
SIDE, SOFTWARE_SIDE = 4096, 1024
ROWS = {"one": 1, "few": 8, "some": 16, "more": 32, "many": 512}
SOFTWARE_ROWS = ROWS | {"many": 32}
COLD_NBYTES = 512 << 20  # The copies of a case's arrays have this many bytes, more than any cache.
HEAP_SHARE = 8  # The copies use at most 1 / HEAP_SHARE of a device's memory.
COPY = "copies within the memory"
EXPERT_TYPES = ("q4_k",)


class Products(Part):
    """Times copies, products with matrices and experts, and attention at 4,096 positions."""

    title = "The copy rate, and each op's share of it"
    share, deadline_s = 0.14, 60.0

    @cached_property
    def _named(self) -> dict[str, Case]:
        limits, is_cpu = self.device.limits, self.device.limits.is_cpu
        side, rows = (SOFTWARE_SIDE, SOFTWARE_ROWS) if is_cpu else (SIDE, ROWS)
        cases: list[Case] = [
            matrix_times.PRODUCTS[op](kind, side, side, rows[name])
            for name in ROW_CLASSES
            for kind in TYPES
            for op in measured.CANDIDATES[name]
            if runs(limits, op, kind) and not (is_cpu and MATRIX_OPS[op].gpus_only)
        ]
        for kind in EXPERT_TYPES:
            cases += [*expert_cases(kind), *(case for case in quantized_cases(kind) if "Id" in repr(case))]
        if not is_cpu:  # a CPU would take minutes
            cases += [*cache_cases(), *attention_cases()]
        return {repr(case): case for case in cases}

    def cases(self) -> list[str]:
        return [COPY, *self._named]

    def run(self, case: str) -> list[Row]:
        copied = measure_copy(self.device)  # cached
        if case == COPY:
            return [{"case": COPY, "GB/s": copied / 1e9}]
        asked = self._named[case]
        if lacks := set(asked.needs) - self.device.limits.features:
            raise LeftOut(f"the device lacks {', '.join(sorted(lacks))}")
        row = time_case(self.device, asked, 3, 20.0, self._cold_nbytes())
        return [timed(row, case, copied)]

    def _cold_nbytes(self) -> int:
        info = self.device.physical
        if info is None or info.is_cpu:
            return 0
        return min(COLD_NBYTES, max(heap.nbytes for heap in info.heaps if heap.device_local) // HEAP_SHARE)


def timed(row: TimedRow, case: str, copied: float) -> dict[str, Any]:
    us = row.us_cpu or row.us_min
    return {
        "case": case,
        "runs": row.runs,
        "us": us,
        "GB/s": row.nbytes / us / 1e3,
        "% of copy": 100 * row.nbytes / us * 1e6 / copied if math.isfinite(copied) else None,
        "GFLOP/s": row.flops / us / 1e3,
    }
