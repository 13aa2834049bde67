"""What a driver's compiler makes of kernels:
`python -m vkbackend.tools.studies.count_instructions -c "MatDot"`.

Compiles what the cases of bench-ops run, with the constants that ops choose for subgroups of that size, and
prints a Markdown table: instructions by class in all, registers, spills, and the inner round of a product for
32 weights. Classes are known of AMD's assembly; of other drivers their own statistics are printed. RADV
compiles for GPUs that are not there: RADV_FORCE_FAMILY=NAVI21 (docs/performance.md).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vkbackend.errors import VkbackendError
from vkbackend.limits import Limits
from vkbackend.recording import Dispatch
from vkbackend.tools.bench_ops import chosen
from vkbackend.tools.console import printable
from vkbackend.tools.measure.turns import errors_told, table
from vkbackend.tools.op_cases.setup import Case, Placed
from vkbackend.twins.device import NumpyDevice

if TYPE_CHECKING:
    from vkbackend.vulkan.pipeline_report import PipelineReport

CLASSES = ("vector", "scalar", "loads", "stores", "LDS")
INNER = ("vector", "loads", "LDS")
COLUMNS = ("kernel", "subgroup", *CLASSES, "registers", "spills", *(f"{name} / 32 weights" for name in INNER))
CASE = r"Mat(Dot|Wave)\(.*n=3072, k=1024, rows=1,"
_PREFIXES = {  # of AMD's instructions; waits and hints are none
    "vector": ("v_",),
    "loads": ("buffer_load", "global_load", "flat_load", "scratch_load"),
    "stores": ("buffer_store", "global_store", "flat_store", "scratch_store"),
    "LDS": ("ds_",),
    "": ("s_waitcnt", "s_wait", "s_clause", "s_nop", "s_delay_alu", "s_code_end"),
    "scalar": ("s_",),
}
_AGAIN = re.compile(r"^\s+\(then repeated (\d+) times\)")
_LABEL, _INSTRUCTION = re.compile(r"^(\w+):"), re.compile(r"^\s+([a-z]\w*)([^;]*)")

Instruction = tuple[str, str]  # what it is called, its operands


def instructions(assembly: str) -> tuple[list[Instruction], list[range]]:
    """Those of AMD's assembly, and the innermost loops: ranges that a jump back closes and that hold none."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    loops: list[range] = []
    for line in assembly.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif again := _AGAIN.match(line):
            found += found[-1:] * int(again[1])
        elif instruction := _INSTRUCTION.match(line):
            found.append((instruction[1], instruction[2].strip()))
    for i, (name, operands) in enumerate(found):
        target = labels.get(operands, i + 1) if name.startswith(("s_branch", "s_cbranch")) else i + 1
        if target <= i:
            loops.append(range(target, i + 1))
    inner = [a for a in loops if not any(a != b and b[0] in a and b[-1] in a for b in loops)]
    return found, inner


def classes(of: list[Instruction]) -> Counter[str]:
    """How many of each class; loads are those of vectors, what reads descriptors is scalar."""
    counts: Counter[str] = Counter()
    for name, _ in of:
        kinds = (kind for kind, prefixes in _PREFIXES.items() if name.startswith(prefixes))
        counts[next(kinds, "")] += 1
    return counts


def inner_round(assembly: str) -> Counter[str] | None:
    """The classes in the innermost loop that loads most; None without a loop."""
    found, loops = instructions(assembly)
    rounds = [classes(found[loop.start : loop.stop]) for loop in loops]
    return max(rounds, key=lambda counts: counts["loads"], default=None)


def dispatches_of(case: Case, limits: Limits) -> list[Dispatch]:
    """What a case runs, recorded without a device."""
    probe = Placed(NumpyDevice("probe"), case.setup(np.random.default_rng(0)))
    try:
        return [c for c in probe.record(limits).accesses() if isinstance(c, Dispatch)]
    finally:
        probe.close()


def row(kernel: str, dispatch: Dispatch, made: PipelineReport, assembly: str) -> tuple[str, ...]:
    """The cells of a kernel; "-" for what the driver does not tell, or no table here knows."""
    named = {name.lower(): int(value) for name, value in made.statistics.items()}
    spills = [value for name, value in named.items() if "spill" in name]
    registers = [v for n, v in named.items() if re.search("vgprs|registers", n) and "spill" not in n]
    counts, inner = classes(instructions(assembly)[0]), inner_round(assembly)
    every = [str(counts[name]) if counts else "-" for name in CLASSES]
    every += [str(max(registers, default="-")), str(sum(spills) if spills else "-")]
    n_weights, per_32 = weights_in_round(dispatch), ["-"] * len(INNER)
    if inner and n_weights:
        per_32 = [f"{inner[name] * 32 / n_weights:g}" for name in INNER]
    return kernel, str(made.subgroup_size or "-"), *every, *per_32


def weights_in_round(dispatch: Dispatch) -> int:
    """How many a thread takes in an inner round, of two rows of w together where it has two; 0: no such
    product."""
    if dispatch.op in ("mat_dot", "mat_dot_id"):  # of each row those that share a scale
        return 32 if dispatch.variant in ("q2_k", "q3_k", "q6_k") else 64
    return {"mat_vec": 8, "mat_vec_id": 8, "mat_wave": 16}.get(dispatch.op, 0)


def kernels(limits: Limits, pattern: str) -> dict[str, Dispatch]:
    """What the cases run that the device can, by the names of pipelines."""
    found = {}
    for case in chosen(pattern, "all"):
        if limits.features.issuperset(case.needs):
            for d in dispatches_of(case, limits):
                found[" ".join([f"{d.op}.{d.variant}", *(f"{name}={value}" for name, value in d.consts)])] = d
    if not found:
        raise VkbackendError(f"the device has not what the cases of {pattern!r} need; name others by --case")
    return found


def measure(spec: str, pattern: str, subgroup: int, folder: Path | None) -> None:
    from vkbackend.vulkan.device import open_for_report
    from vkbackend.vulkan.instance import devices, select
    from vkbackend.vulkan.pipeline_report import report_of

    info = select(spec, devices())
    low, high = int(info.features["subgroup_min"]), int(info.features["subgroup_max"])
    if info.features["subgroup_size_control"] and low <= subgroup <= high:
        info = replace(info, limits=info.limits | {"subgroup_size": subgroup})
    device, rows = open_for_report(info), []
    try:
        wanted = kernels(device.limits, pattern)
        pipelines = device.programs.pipelines(list(wanted.values()))
        for (kernel, dispatch), (pipeline, _) in zip(wanted.items(), pipelines, strict=True):
            made = report_of(device, pipeline)
            assembly = made.texts.get("Assembly", "") if info.vendor == "AMD" else ""
            rows.append(row(kernel, dispatch, made, assembly))
            if not assembly:
                told = ", ".join(f"{name} {value:g}" for name, value in made.statistics.items())
                sys.stdout.write(f"{kernel}: {printable(told)}\n")
            if folder:
                write_texts(folder, kernel, made.texts)
    finally:
        device.close()
    table(printable(f"{info.name}, {info.driver_version}"), COLUMNS, rows)


def write_texts(folder: Path, kernel: str, texts: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / (re.sub("[^A-Za-z0-9_.=]+", "-", f"{kernel} {name}") + ".txt")).write_text(text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("-dev", "--device", default="0", metavar="NAME", help="the device (default: 0)")
    add("-c", "--case", default=CASE, metavar="REGEX", help="which cases of bench-ops (default: %(default)s)")
    add("--subgroup", type=int, default=32, metavar="N",
        help="the size of subgroups, where the device has a choice (default: 32)")  # fmt: skip
    add("--texts", type=Path, metavar="DIR", help="keep all texts that the driver gives in this folder")
    args = parser.parse_args(argv)
    with errors_told():
        measure(args.device, args.case, args.subgroup, args.texts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
