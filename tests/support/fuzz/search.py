"""Checks random cases, and finds the smallest case of each fault."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from fuzz.worker import Worker, kind_of

KINDS = {
    "gguf": "fuzz.files:Files", "metadata": "fuzz.metadata:ModelMetadata",
    "adapter": "fuzz.adapters:Adapters",
    "state": "fuzz.states:States", "block": "fuzz.files:Blocks", "grammar": "fuzz.texts:Grammars",
    "template": "fuzz.texts:Templates", "header": "fuzz.requests:Headers", "body": "fuzz.requests:Bodies",
    "picture": "fuzz.pictures:Pictures", "image": "fuzz.image_bodies:ImageBodies",
}  # fmt: skip
SMALLER_S, SMALLER_TRIES = 60.0, 2000
N_WARM = 300  # After this number of cases, memory and descriptors must not grow.
MORE_MIB, MORE_FILES = 200, 20


def signature(fault: str) -> str:
    """Return the part of a fault's text that does not depend on the case."""
    return fault.split(": ")[0] if not fault.startswith("Wrong") else fault[:60]


def smaller(case: bytes, still: Callable[[bytes], bool]) -> bytes:
    """Remove parts of a case while `still` holds. This is the reduction of Zeller and Hildebrandt's ddmin
    (Simplifying and Isolating Failure-Inducing Input, 2002) without complements."""
    end, tries = time.monotonic() + SMALLER_S, 0
    length = max(1, len(case) // 2)
    while case and tries < SMALLER_TRIES and time.monotonic() < end:
        at, shrunk = 0, False
        while at < len(case) and tries < SMALLER_TRIES and time.monotonic() < end:
            tries += 1
            if still(shorter := case[:at] + case[at + length :]):
                case, shrunk = shorter, True
            else:
                at += length
        if length == 1 and not shrunk:
            break
        length = max(1, length // 2)
    return case


@dataclass
class Report:
    """`ends` counts cases by how they ended. `findings` has (seed and number, fault, smallest case)."""

    name: str
    n: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[str, str, bytes]] = field(default_factory=list)
    grown: tuple[float, int] = (0.0, 0)


def random_of(seed: int, name: str, number: int) -> random.Random:
    return random.Random(f"{seed}/{name}/{number}")


def numbers(n: int | None, seconds: float) -> Iterator[int]:
    end, number = time.monotonic() + seconds, 0
    while (n is None or number < n) and time.monotonic() < end:
        yield number
        number += 1


def search(
    name: str, seed: int, n: int | None, seconds: float, show: Callable[[Report], None] = lambda report: None
) -> Report:
    """Check at most `n` cases for `seconds`. `name` is a key of KINDS, or module:class."""
    path, report = KINDS.get(name, name), Report(name)
    with TemporaryDirectory(prefix="fuzz-") as folder:
        kind = kind_of(path)(Path(folder))
        worker, before = Worker(path, kind.deadline_s), None
        try:
            for number in numbers(n, seconds):
                case = kind.make(random_of(seed, name, number))
                end, fault = worker.check(case)
                report.n += 1
                report.ends[end] += 1
                if fault:
                    mark, before = signature(fault), None
                    report.faults[mark] += 1
                    if report.faults[mark] == 1:
                        least = smaller(case, lambda c: signature(worker.check(c)[1]) == mark)  # noqa: B023
                        report.findings.append((f"seed {seed}, number {number}", fault, least))
                elif report.n % N_WARM == 0:
                    now = worker.size()
                    before = before or now
                    report.grown = now[0] - before[0], now[1] - before[1]
                show(report)
            if report.grown[0] > MORE_MIB or report.grown[1] > MORE_FILES:
                grown = f"leak: {report.grown[0]:.0f} MiB and {report.grown[1]} files more"
                report.findings.append((f"seed {seed}", grown, b""))
        finally:
            worker.close()
            close = getattr(kind, "close", None)
            if close:
                close()
    return report
