"""Times all matrix products that a device can run, and ranks them by speed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from vkbackend.limits import Limits
from vkbackend.ops import measured
from vkbackend.ops.choice import mat_op, runs
from vkbackend.ops.table import MATRIX_OPS
from vkbackend.runtime import Device
from vkbackend.tools.measure.case_times import time_case
from vkbackend.tools.op_cases.cases import CASES
from vkbackend.tools.op_cases.half import PackF16
from vkbackend.tools.op_cases.matrix import MatVec
from vkbackend.tools.op_cases.quantized import QuantizeQ8
from vkbackend.tools.op_cases.setup import Case

ROWS = {"one": 1, "few": 4, "some": 12, "more": 24, "many": 128}  # Row class -> rows of x.
TYPES = ("f16", "q8_0", "q4_0", "q4_k")  # If an op takes f32 x, it supports the first type.
SHAPES = ((2048, 2048), (256, 1024))  # N and k of the matrices.
GAIN = 0.9
PRODUCTS = {case.op.name: type(case) for case in CASES if isinstance(case, MatVec)}
ROUNDING: dict[str, Any] = {"q8": QuantizeQ8, "f16s": PackF16}
# Each matrix's share of the time to round x. A layer has 7 matrices but 4 roundings of x, because q, k and v
# share one rounding, and gate and up share another.
ROUNDED = 4 / 7
Times = dict[str, dict[str, dict[str, float]]]  # [row class][op][type] -> microseconds


def cases_of(limits: Limits) -> list[Case]:
    asked: dict[Case, None] = {}

    def note(case: Case) -> float:
        asked[case] = None
        return 0.0

    times_by(limits, note)
    return list(asked)


def time_of(device: Device, case: Case, ms: float = 20.0) -> float:
    """Return a case's microseconds (on software devices, of CPU time)."""
    row = time_case(device, case, 3, ms)
    return row.us_cpu or row.us_min


def times_of(device: Device, ms: float = 20.0) -> Times:
    """Return the times of all ops that the device can run, summed over SHAPES."""
    return times_by(device.limits, cache(lambda case: time_of(device, case, ms)))


def times_by(limits: Limits, us: Callable[[Case], float]) -> Times:
    """Return the times of all ops. `us` returns the microseconds of a case."""

    def us_of(op: str, kind: str, rows: int) -> float:
        rounding = ROUNDING.get(MATRIX_OPS[op].x_type)
        return sum(
            us(PRODUCTS[op](kind, n, k, rows)) + (ROUNDED * us(rounding(k, rows)) if rounding else 0.0)
            for n, k in SHAPES
        )

    return {
        name: {
            op: {kind: us_of(op, kind, rows) for kind in kinds}
            for op in measured.CANDIDATES[name]
            if not (limits.is_cpu and MATRIX_OPS[op].gpus_only)
            and (kinds := [kind for kind in TYPES if runs(limits, op, kind)])
        }
        for name, rows in ROWS.items()
    }


def ranked(times: Iterable[Times], limits: Limits) -> measured.Table:
    """Rank the ops of each row class, fastest first. An op ranks before the built-in choice only if it is at
    least a tenth faster (GAIN).

    An op is compared only on the types that it supports.
    """
    total: Times = defaultdict(lambda: defaultdict(lambda: defaultdict(float)))
    for of_device in times:
        for name, by_op in of_device.items():
            for op, by_type in by_op.items():
                for kind, us in by_type.items():
                    total[name][op][kind] += us
    ranking: measured.Table = {}
    for name, by_op in total.items():
        rules = {kind: mat_op(limits, ROWS[name], kind) for kind in TYPES}
        plain = by_op[rules[TYPES[0]]]

        def relative(op: str, by_op: Any = by_op, plain: Any = plain, rules: Any = rules) -> float:
            gain = GAIN if op in rules.values() else 1.0
            return gain * sum(by_op[op].values()) / sum(plain[kind] for kind in by_op[op])

        ranking[name] = tuple(sorted(by_op, key=relative))
    return ranking
