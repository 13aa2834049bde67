"""Counts the instructions that GPU compilers generate: `python -m vkbackend.tools.studies.count_instructions
-g NAVI31,DG2,AMPERE -c "MatDot"`.

Compiles cases of `bench-ops` with the constants that ops choose for the device, or any SPIR-V (--spirv).
Prints statistics of the kernel and the instructions of its hot loop (tools/measure/assembly.py). The flag -g
selects compilers from `tools/setup.sh --compilers`, which need no GPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vkbackend.errors import VkbackendError
from vkbackend.limits import Limits
from vkbackend.recording import Dispatch
from vkbackend.tools.console import printable
from vkbackend.tools.measure import compilers
from vkbackend.tools.measure.kernel_row import COLUMNS, KernelRow, cells, row_of
from vkbackend.tools.measure.turns import exit_on_errors, table
from vkbackend.tools.op_cases.cases import cases_named
from vkbackend.tools.op_cases.setup import Case, Placed
from vkbackend.twins.device import NumpyDevice

if TYPE_CHECKING:
    from vkbackend.vulkan.pipeline_report import PipelineReport

# docs/measurements/kernels.csv contains these cases and GPUs.
_KINDS, _ROWS = r"\(type='(q4_0|q4_k|q6_k|q8_0|f16)',", "(1|8|128|512)"
RECORDED = f"Mat(Dot|Wave|Tile|MulDot|MulCoop|MulDotCoop){_KINDS} n=3072, k=1024, rows={_ROWS},"
RECORDED_GPUS = ("NAVI21", "NAVI31", "DG2", "BMG", "AMPERE")
MODULE = "vkbackend.tools.studies.count_instructions"
CASE = r"Mat(Dot|Wave)\(.*n=3072, k=1024, rows=1,"


def dispatches_of(case: Case, limits: Limits) -> list[Dispatch]:
    probe = Placed(NumpyDevice("probe"), case.setup(np.random.default_rng(0)))
    try:
        return [c for c in probe.record(limits).accesses() if isinstance(c, Dispatch)]
    finally:
        probe.close()


def kernels(limits: Limits, pattern: str, per_op: int = 0) -> dict[str, Dispatch]:
    by_name: dict[str, Dispatch] = {}
    taken: Counter[type] = Counter()
    for case in cases_named(pattern, "all"):
        if per_op and taken[type(case)] == per_op:
            continue
        if limits.features.issuperset(case.needs) and case.fits(limits):
            taken[type(case)] += 1
            for d in dispatches_of(case, limits):
                by_name[
                    " ".join([f"{d.op}.{d.variant}", *(f"{name}={value}" for name, value in d.consts)])
                ] = d
    if not by_name:
        raise VkbackendError(f"the device has not what the cases of {pattern!r} need; name others by --case")
    return by_name


def measure(args: argparse.Namespace) -> Iterator[KernelRow]:
    from vkbackend.tools.measure.spirv import report_of_spirv
    from vkbackend.vulkan.device import open_for_report
    from vkbackend.vulkan.instance import devices, select
    from vkbackend.vulkan.pipeline_report import report_of

    info = select(args.device, devices())
    low, high = int(info.features["subgroup_min"]), int(info.features["subgroup_max"])
    if args.subgroup and info.features["subgroup_size_control"] and low <= args.subgroup <= high:
        info = replace(info, limits=info.limits | {"subgroup_size": args.subgroup})
    name = args.label or printable(info.name)
    device = open_for_report(info)

    def kept(kernel: str, report: PipelineReport, lanes: int) -> KernelRow:
        if args.texts:
            write_texts(args.texts, f"{name} {kernel}", report.texts)
        return row_of(
            name, info.vendor, kernel, report.subgroup_size or lanes, report.statistics, report.texts
        )

    try:
        for path, consts, lanes in args.spirv:
            report = report_of_spirv(device, Path(path).read_bytes(), consts, lanes)
            yield kept(Path(path).stem, report, lanes)
        if args.spirv and args.case is None:
            return
        wanted = kernels(device.limits, args.case or CASE, args.per_op)
        pipelines = device.programs.pipelines(list(wanted.values()))
        for (kernel, dispatch), (pipeline, _) in zip(wanted.items(), pipelines, strict=True):
            lanes = dict(dispatch.consts).get("LANES", info.limits["subgroup_size"])
            yield kept(kernel, report_of(device, pipeline), lanes)
    finally:
        if info.vendor != "Broadcom":  # V3DV often crashes in vkDestroyDevice on its shim.
            device.close()


def write_texts(folder: Path, kernel: str, texts: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / (re.sub("[^A-Za-z0-9_.=]+", "-", f"{kernel} {name}") + ".txt")).write_text(
            text, encoding="utf-8"
        )


def rows_of(gpu: str, arguments: Sequence[str]) -> list[KernelRow]:
    target = compilers.gpu_of(gpu)
    asked = ["-dev", "0", "--label", target.name, "--json", *arguments]
    return [KernelRow(**row) for row in compilers.ask(target, MODULE, asked)]


def record(path: Path, gpus: Sequence[str], arguments: Sequence[str]) -> None:
    """Write the counts to a CSV file, without the columns that no compiler gives."""
    rows = [
        {"mesa": compilers.version(compilers.gpu_of(gpu))} | asdict(row)
        for gpu in gpus
        for row in rows_of(gpu, arguments)
    ]
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def spirv_argument(text: str) -> tuple[str, dict[int, int], int]:
    """Parse FILE[:ID=VALUE,...][:LANES]."""
    path, *rest = text.split(":")
    pairs = [pair.split("=") for pair in rest[0].split(",") if pair] if rest else []
    return path, {int(a): int(b) for a, b in pairs}, int(rest[1]) if len(rest) > 1 else 0


def main(argv: Sequence[str] | None = None) -> int:
    # These options are not passed on to the process of a compiler.
    ours = argparse.ArgumentParser(add_help=False)
    ours.add_argument(
        "-g",
        "--gpus",
        default="",
        metavar="NAMES",
        help=f"compilers of GPUs that need not be there, of {', '.join(compilers.GPUS)}, or all; "
        f"or {', '.join(compilers.ARM_GPUS)}, which take ten times as long",
    )
    ours.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write the counts to this CSV file (default: of the cases and GPUs that a test compares)",
    )
    ours.add_argument("--json", action="store_true", help="one line of JSON instead of the table")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], parents=[ours])
    add = parser.add_argument
    add("-dev", "--device", default="0", metavar="NAME", help="a device of this machine (default: 0)")
    add("-c", "--case", metavar="REGEX", help=f"which cases of bench-ops (default: {CASE})")
    add(
        "--per-op",
        type=int,
        default=0,
        metavar="N",
        help="only the first N cases of each kind that the device can run (default: all)",
    )
    add(
        "--spirv",
        action="append",
        default=[],
        type=spirv_argument,
        metavar="FILE[:ID=VALUE,...[:LANES]]",
        help="compile this SPIR-V, too, with these specialization constants (repeatable)",
    )
    add(
        "--subgroup",
        type=int,
        default=0,
        metavar="N",
        help="the size of subgroups, if the device has a choice (default: its own)",
    )
    add("--texts", type=Path, metavar="DIR", help="keep all texts that the driver gives in this folder")
    add("--label", default="", help=argparse.SUPPRESS)
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(arguments)
    with exit_on_errors():
        gpus = list(compilers.GPUS) if args.gpus == "all" else args.gpus.split(",")
        passed = ours.parse_known_args(arguments)[1]
        if args.record:
            cases = [] if args.case else ["-c", RECORDED]
            record(args.record, gpus if args.gpus else RECORDED_GPUS, [*passed, *cases])
            return 0
        if args.gpus:
            rows = [row for gpu in gpus for row in rows_of(gpu, passed)]
        else:
            rows = list(measure(args))
        if args.json:
            sys.stdout.write(json.dumps([asdict(row) for row in rows]) + "\n")
        else:
            table("", COLUMNS, [cells(row) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
