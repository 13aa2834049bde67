"""Estimates the fastest op for each number of rows: `python -m vkbackend.tools.studies.row_choice`.

Compiles every op that multiplies an N x K matrix by 1 to 512 rows, for GPUs that may be absent. Row counts
are rounded up as in a model's steps. An op's time is estimated as the larger of memory time and compute time.
Memory time is the bytes of matrix, x and y divided by the memory's rate. Compute time is the hot loop's
vector instructions plus the matrix units' multiply-adds at peak rate. Partly filled tiles count as full.
Launches, latency and code outside the loop are ignored, so times are lower bounds. These times can rank the
ops of one GPU, but cannot compare GPUs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from vkbackend.buffer import Buffer, Home, View
from vkbackend.limits import Limits
from vkbackend.meta.step_kind import bucket
from vkbackend.ops import MATRIX_OPS, Recorder
from vkbackend.ops.choice import mat_op, runs
from vkbackend.ops.matrix import MatrixOp, Size, row_class
from vkbackend.recording import Dispatch, Recording
from vkbackend.tools.measure import compilers
from vkbackend.tools.measure.kernel_row import row_of
from vkbackend.tools.measure.turns import exit_on_errors, table

N = K = 4096
ROWS = tuple(dict.fromkeys(bucket(n) for n in range(1, 513)))
TYPES = ("q4_0", "q4_k", "q6_k", "q8_0", "f16")
MODULE = "vkbackend.tools.studies.row_choice"


@dataclass(frozen=True)
class Rates:
    nbytes: float  # Bytes of memory per second.
    issues: float  # Vector instructions of subgroups per second, on all cores together.
    matrix: float = 0.0  # F16 multiply-adds on matrix units per second.
    dot: int = 1  # Vector instructions per dot product of four bytes.
    int8: int = 1  # The rate of int8 on matrix units, divided by F16's rate.


RATES = {
    "NAVI21": Rates(512e9, 144 * 2.25e9 / 2),  # RX 6800 XT: a SIMD computes 64 lanes in two cycles.
    "NAVI31": Rates(960e9, 192 * 2.5e9 / 2, 61e12),  # RX 7900 XTX.
    "DG2": Rates(560e9, 512 * 2.1e9 / 2, 69e12, int8=2),  # A770: an engine computes 16 lanes in two cycles.
    "BMG": Rates(456e9, 160 * 2.67e9, 58e12, int8=2),  # B580.
    "TURING": Rates(616e9, 272 * 1.55e9 / 2, 27e12, int8=4),  # RTX 2080 Ti: 16 lanes a cycle per partition.
    "AMPERE": Rates(936e9, 328 * 1.7e9, 36e12, dot=2, int8=4),  # RTX 3090: integers at half the rate.
}


@dataclass(frozen=True)
class Cost:
    rows: int
    op: str
    chosen: bool
    memory_us: float
    issue_us: float

    @property
    def us(self) -> float:
        return max(self.memory_us, self.issue_us)


def dispatch_of(op: MatrixOp, limits: Limits, kind: str, n_rows: int) -> Dispatch:
    def view(shape: tuple[int, ...], dtype: str) -> View:
        return View(Buffer(1 << 40, Home.SCRATCH, "nowhere"), 0, shape, dtype)

    recording = Recording("row choice")
    op(
        Recorder(recording, limits),
        view((N, K), kind),
        view((n_rows, K), op.x_type),
        view((n_rows, N), "f32"),
    )
    return next(c for c in recording.accesses() if isinstance(c, Dispatch))


def tile_rows(consts: dict[str, int]) -> int:
    if "FN" in consts:
        return consts["N"] * consts["FN"] * consts["SN"]
    return 8 * consts["RN"] if "RN" in consts else consts["N"]


def costs(gpu: str, kind: str) -> Iterator[Cost]:
    from vkbackend.vulkan.device import open_for_report
    from vkbackend.vulkan.instance import devices, select
    from vkbackend.vulkan.pipeline_report import report_of

    info, rates, seen = select("0", devices()), RATES[gpu], dict[object, float]()
    device = open_for_report(info)
    limits = device.limits
    if rates.int8 == 4:  # NVK reports `int8_units_fast` only for an installed GPU.
        limits = replace(limits, features=limits.features | {"int8_units_fast"})
    try:
        for n_rows in ROWS:
            for op in MATRIX_OPS.values():
                if row_class(n_rows) not in op.rows or not runs(limits, op.name, kind):
                    continue
                d = dispatch_of(op, limits, kind, n_rows)
                key, consts = (d.op, d.variant, d.consts), dict(d.consts)
                if key not in seen:
                    [(pipeline, _)] = device.programs.pipelines([d])
                    report = report_of(device, pipeline)
                    lanes = report.subgroup_size or consts.get("LANES", info.limits["subgroup_size"])
                    row = row_of(gpu, info.vendor, op.name, lanes, report.statistics, report.texts)
                    assert row.vector and row.macs, (gpu, key)
                    seen[key] = row.vector / row.macs
                    if "int_dot" in op.needs:  # 4 multiply-adds per lane
                        seen[key] += (rates.dot - 1) / (4 * lanes)
                macs = N * K * tile_rows(consts) * op.grid(limits, Size(N, K, n_rows)).along_x
                on_units = macs / rates.matrix if "matrix_units" in op.needs else 0.0
                on_units /= rates.int8 if "int8_units" in op.needs else 1
                nbytes = sum(view.nbytes for view in (*d.args[:2], d.args[3]))
                yield Cost(
                    n_rows,
                    op.name,
                    op.name == mat_op(limits, n_rows, kind),
                    1e6 * nbytes / rates.nbytes,
                    1e6 * (macs * seen[key] / rates.issues + on_units),
                )
    finally:
        device.close()


SHOWN = (1, 8, 16, 32, 64, 128, 512)
COLUMNS = ("GPU", "type", *(f"{n} rows" for n in SHOWN), "largest growth for a row", "slowest choice")


def table_row(gpu: str, kind: str, costs_of_kind: Sequence[Cost]) -> tuple[str, ...]:
    """Return a row of the table: the GPU, the type, the chosen ops and their microseconds. The next column is
    the largest factor by which the time per row grows from one number of rows to the next. The last column is
    the largest ratio of a chosen op's time to the fastest op's time."""
    chosen = {cost.rows: cost for cost in costs_of_kind if cost.chosen}
    shown = (f"{chosen[n].op.removeprefix('mat_')} {chosen[n].us:.3g}" for n in SHOWN)
    growth, a, b = max((chosen[b].us / b / (chosen[a].us / a), a, b) for a, b in pairwise(ROWS))
    slower, rows, other = max((chosen[cost.rows].us / cost.us, cost.rows, cost.op) for cost in costs_of_kind)
    slowest = f"{slower:.2f} x {other} at {rows}" if slower > 1 else "-"
    return gpu, kind, *shown, f"{growth:.2f} from {a} to {b}", slowest


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-g", "--gpus", default=",".join(RATES), help="(default: %(default)s)")
    parser.add_argument("-t", "--types", default=",".join(TYPES), help="of weights (default: %(default)s)")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    with exit_on_errors():
        if args.alone:
            records = [asdict(cost) for cost in costs(args.gpus, args.types)]
            sys.stdout.write(json.dumps(records) + "\n")
            return 0
        lines: list[tuple[str, ...]] = []
        for gpu in args.gpus.split(","):
            for kind in args.types.split(","):
                asked = compilers.ask(compilers.gpu_of(gpu), MODULE, ["--alone", "-g", gpu, "-t", kind])
                lines.append(table_row(gpu, kind, [Cost(**record) for record in asked]))
        table(f"Microseconds of {N} x {K}, by counted work", COLUMNS, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
