"""Checks random hostile input: `bash tools/fuzz.sh --seconds 60 gguf header`.

Kinds: gguf and metadata (model files), adapter, state (saved states), block (files of the prefix cache),
grammar (also schemas and regular expressions), template, header and body (HTTP), picture, image (bodies with
images). A finding is an exception other than a `VkbackendError`, a crash, a hang, a wrong answer, or growth
of memory or open files. Its seed is printed, and its smallest case is kept. The exit code is 1 after a
finding.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from pathlib import Path

from fuzz.search import KINDS, Report, search
from fuzz.worker import Worker, kind_of

ALL = 1_000_000


class Shown:
    def __init__(self) -> None:
        self._began = self._last = time.monotonic()

    def __call__(self, report: Report) -> None:
        now = time.monotonic()
        if now - self._last >= 10:
            self._last = now
            speed = report.n / (now - self._began)
            print(
                f"{report.name}: {report.n} cases, {speed:.0f}/s, {len(report.findings)} findings",
                file=sys.stderr,
            )


def keep(folder: Path, report: Report) -> None:
    for where, fault, case in report.findings:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{report.name}-{hashlib.sha256(case).hexdigest()[:8]}"
        path.write_bytes(case)
        shown = repr(case) if len(case) <= 400 else f"{case[:400]!r}..."
        print(f"FOUND {report.name}, {where}: {fault}\n  {len(case)} bytes in {path}: {shown}", flush=True)


def replay(path: Path) -> bool:
    """Check a kept case, whose file name begins with its kind. Return whether it is handled well."""
    name = path.name.partition("-")[0]
    worker = Worker(KINDS[name], kind_of(KINDS[name]).deadline_s)
    try:
        end, fault = worker.check(path.read_bytes())
    finally:
        worker.close()
    print(f"{path}: {fault or end}")
    return not fault


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools/fuzz.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)} (default: all)")
    parser.add_argument("--cases", type=int, metavar="N", help="at most N cases of each kind")
    parser.add_argument("--seed", type=int, metavar="S", help="first seed (default: a random one, printed)")
    parser.add_argument(
        "--seconds", type=float, metavar="T", help="at most T seconds for each kind (default: 20)"
    )
    parser.add_argument("--all", action="store_true", help=f"{ALL:,} cases of each kind, for hours")
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), metavar="FOLDER",
                        help="folder for findings (default: %(default)s)")  # fmt: skip
    parser.add_argument("--replay", type=Path, nargs="+", metavar="FILE", help="check kept cases again")
    args = parser.parse_args()
    if wrong := set(args.kinds) - set(KINDS):
        parser.error(f"unknown kinds {', '.join(sorted(wrong))}; there are {', '.join(KINDS)}")
    if args.replay:
        return 0 if all([replay(path) for path in args.replay]) else 1
    seed = random.randrange(1 << 32) if args.seed is None else args.seed
    bounded = args.cases is not None or args.all
    seconds = args.seconds or (1e9 if bounded else 20.0)
    n = args.cases or (ALL if args.all else None)
    print(
        f"seed {seed}\n{'kind':9} {'cases':>9} {'seconds':>8}  ends; findings; growth of MiB and open files",
        flush=True,
    )
    n_findings = 0
    for name in args.kinds or KINDS:
        began = time.monotonic()
        report = search(name, seed, n, seconds, Shown())
        ends = ", ".join(f"{end} {count}" for end, count in sorted(report.ends.items()))
        grown = f"{report.grown[0]:.0f} and {report.grown[1]}"
        print(
            f"{name:9} {report.n:9} {time.monotonic() - began:8.0f}  {ends}; {len(report.findings)}; {grown}",
            flush=True,
        )
        keep(args.keep, report)
        n_findings += len(report.findings)
    return 1 if n_findings else 0


if __name__ == "__main__":
    sys.exit(main())
