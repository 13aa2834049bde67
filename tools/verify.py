"""`vkbackend verify`: check every op on every device against its numpy twin.

The output, which you can paste into a bug report, names the device, its driver and features. A row per op and
variant shows passed and failed cases, the largest error and the allowed error. The flag --seed repeats a run
with the same random inputs. The exit code is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import re
import secrets
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from vkbackend import __version__, env
from vkbackend.checks import whole_number
from vkbackend.errors import InvalidArgument
from vkbackend.models.arguments import HOST, device_list
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.sampling.params import MAX_SEED
from vkbackend.ops.table import OPS
from vkbackend.runtime import Device
from vkbackend.shaderlib import variants
from vkbackend.tools.console import console, printable, table, write_json
from vkbackend.tools.flags.present import present
from vkbackend.tools.op_cases.cases import CASES, WIDE_CASES
from vkbackend.tools.op_cases.check import check_case, is_lost

COLUMNS = ("device", "shader", "result", "cases", "failed", "worst NMSE", "allowed")


@dataclass(slots=True)
class Result:
    device: str
    shader: str
    cases: int = 0
    worst: float = 0.0
    allowed: float = 0.0
    failures: list[str] = field(default_factory=list)
    lacks: tuple[str, ...] = ()  # missing features

    @property
    def verdict(self) -> str:
        return "FAIL" if self.failures else "pass" if self.cases else "skipped"

    def cells(self) -> tuple[Any, ...]:
        if not self.cases:
            return printable(self.device), self.shader, self.verdict, 0, 0, "", ""
        errors = f"{self.worst:.2g}", f"{self.allowed:.2g}"
        return printable(self.device), self.shader, self.verdict, self.cases, len(self.failures), *errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-dev", "--device", dest="devices", metavar="LIST",
        help="the devices, comma-separated (default: all)")  # fmt: skip
    add("-c", "--case", metavar="REGEX", default="", help="only cases whose name matches (default: all)")
    add("--all", action="store_true", help="the wide sweep too: takes many minutes on a software device")
    add("--seed", type=int, metavar="N", help="seed of the random inputs (default: a new one)")
    add("--json", action="store_true", help="print one JSON object instead of the tables")


def verify(device: Device, pattern: re.Pattern[str], wide: bool, seed: int) -> list[Result]:
    """Return a result for every variant in the manifest. Print progress to stderr."""
    results = {
        f"{op}.{variant}": Result(
            device.name, f"{op}.{variant}", lacks=tuple(sorted({*OPS[op].needs} - device.limits.features))
        )
        for op, variant in variants()
    }
    cases = [case for case in [*CASES, *(WIDE_CASES if wide else [])] if pattern.search(repr(case))]
    with console(stderr=True).status("") as status:
        for i, case in enumerate(cases):
            status.update(f"{device.name}: {i + 1}/{len(cases)} {printable(repr(case))}"[:150])
            for checked in check_case(case, device, seed):
                failure = f"{case!r}: {checked.failure}" if checked.failure else ""
                for name in checked.shaders:
                    result = results.setdefault(name, Result(device.name, name))
                    result.cases += 1
                    result.worst = max(result.worst, checked.error)
                    result.allowed = max(result.allowed, case.tolerance)
                    result.failures += [failure] if failure else []
            if is_lost(device):
                break
    return list(results.values())


def run(args: argparse.Namespace) -> int:
    try:
        pattern = re.compile(args.case)
    except re.error as error:
        raise InvalidArgument(f"--case {args.case!r} is not a regular expression: {error}") from None
    if args.seed is not None:
        whole_number("--seed", args.seed, 0, MAX_SEED)
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    words = device_list("devices", args.devices) or tuple(str(info.index) for info in present())
    if HOST in words:
        raise InvalidArgument(
            "numpy is the reference that devices are checked against; pass one of `vkbackend devices`"
        )
    results: list[Result] = []
    report: list[dict[str, Any]] = []
    for word in words:
        [device] = open_devices([word])
        try:
            report.append(_about(device))
            results += verify(device, pattern, args.all, seed)
        finally:
            device.close()
    if not any(result.cases for result in results):
        raise InvalidArgument(f"--case {args.case!r} matches no case")
    if args.json:
        rows = [asdict(result) | {"result": result.verdict} for result in results]
        write_json({"version": __version__, "seed": seed, "devices": report, "results": rows})
    else:
        _show(results, report, seed, all_cases=not args.case)
    return 1 if any(result.failures for result in results) else 0


def _about(device: Device) -> dict[str, Any]:
    info = device.physical
    if info is None:
        return {"device": device.name}
    on = sorted(name for name, value in device.features.items() if value)  # type: ignore[attr-defined]
    return {
        "device": device.name,
        "name": info.name,
        "driver": f"{info.driver} {info.driver_version}",
        "features": on,
        "disabled": sorted(env.disabled()),
    }


def _show(results: list[Result], report: list[dict[str, Any]], seed: int, all_cases: bool) -> None:
    out = console()
    for about in report:
        parts = [f"{key} {', '.join(v) if isinstance(v, list) else v}" for key, v in about.items() if v]
        out.print(printable("; ".join(parts)), markup=False, soft_wrap=True)
    shown = [result for result in results if result.cases]
    out.print(table(f"vkbackend {__version__}, seed {seed}", COLUMNS, [r.cells() for r in shown]))
    skipped: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for result in results if all_cases else ():
        if not result.cases:
            skipped.setdefault((result.device, result.lacks), []).append(result.shader)
    for (device, lacks), shaders in skipped.items():
        why = f"it lacks {', '.join(lacks)}" if lacks else "no case used them here"
        ops = Counter(shader.partition(".")[0] for shader in shaders)
        names = ", ".join(f"{op} ({n})" for op, n in ops.items())
        out.print(printable(f"{device} skipped {len(shaders)}, {why}: {names}"), markup=False, soft_wrap=True)
    for result in results:
        for failure in result.failures:
            out.print(
                printable(f"FAIL {result.device} {result.shader}: {failure}"), markup=False, soft_wrap=True
            )
    counts = Counter(result.verdict for result in (results if all_cases else shown))
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("pass", "FAIL", "skipped"))
    out.print(f"shader variants on {len(report)} devices: {summary}", markup=False)


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["verify", *sys.argv[1:]]))
