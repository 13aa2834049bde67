"""Run parts in their own processes, case by case. So a crash or hang costs one case.

Parts share the total time; unused time passes to the next part. Each process runs at least one case, which
may take until its deadline.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from vkbackend.system.interrupts import name_of
from vkbackend.system.process_tree import APART, Tree
from vkbackend.tools.report.part import Group, Row

WORKER = (sys.executable, "-m", "vkbackend.tools.report.worker")
START_S = 120.0
KILL_S = 10.0  # A killed process that still blocks after this time is abandoned.
MAX_LOSSES = 8  # After this many lost processes, a part is abandoned on these devices.
# Arguments: the case that starts, the number of finished cases, the number of all cases.
Tell = Callable[[str, int, int], None]


@dataclass(slots=True)
class Outcome:
    """A part's results on a group of devices. `unfinished` describes missing cases."""

    devices: Group
    rows: list[Row] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)  # (case, reason)
    failed: list[tuple[str, str]] = field(default_factory=list)
    cases: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    unfinished: str = ""
    stuck: bool = False  # an unkillable process
    n_late: int = 0  # of `failed`, the cases that exceeded their deadline


class Child:
    """A worker process. Leaving the `with` block kills the process and its children."""

    def __init__(self, job: dict[str, Any], environment: dict[str, str], folder: Path) -> None:
        self._log = open(folder / "worker.log", "w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            WORKER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            encoding="utf-8",
            env={**os.environ, **environment},
            **APART,
        )
        self._tree = Tree(self._process)  # with llama-bench
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        assert self._process.stdin is not None
        with suppress(OSError):  # The process has ended.
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.close()
        self.stuck = False

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError):  # the line may be incomplete
                self._messages.put(json.loads(line))
        self._messages.put(None)

    def next(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next message, or None after the last message. Raises TimeoutError."""
        try:
            return self._messages.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            raise TimeoutError from None

    def how_it_ended(self) -> str:
        """Wait for the process, and describe a failure. Return "" after success."""
        code = self._process.wait(KILL_S)
        if not code:
            return ""
        self._log.seek(0)
        said = [line.strip() for line in self._log if line.strip()][-1:]
        how = f"signal {name_of(code)}" if code < 0 else name_of(code)
        return f"the process ended with {how}" + (f": {said[0][-300:]}" if said else "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tree.kill()
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            self.stuck = True
        self._log.close()


@dataclass(frozen=True, slots=True)
class Job:
    """A part to run on a group of devices, until time.monotonic() is `until`."""

    part: str
    devices: Group
    until: float
    deadline_s: float
    environment: dict[str, str]
    folder: Path


def run_job(job: Job, tell: Tell) -> Outcome:
    outcome = Outcome(job.devices)
    if time.monotonic() > job.until:
        outcome.unfinished = "no time was left for it"
        return outcome
    for _ in range(MAX_LOSSES):
        if outcome.stuck or outcome.unfinished or not _go_on(job, outcome, tell):
            return outcome
    outcome.unfinished = outcome.unfinished or f"given up after {MAX_LOSSES} losses"
    return outcome


def _go_on(job: Job, outcome: Outcome, tell: Tell) -> bool:
    """Run one more process. Return whether cases remain."""
    asked = {"part": job.part, "devices": job.devices, "done": outcome.done, "rows": outcome.rows}
    current, n_before = "", len(outcome.done)
    child = Child(asked, job.environment, job.folder)
    with child:
        while True:
            n = len(outcome.done)
            if not current and n_before < n < len(outcome.cases) and time.monotonic() > job.until:
                outcome.unfinished = f"{n} of {len(outcome.cases)} cases were done in its time"
                break
            wait_s = job.deadline_s if current else START_S
            try:
                message = child.next(wait_s)
            except TimeoutError:
                _fail(outcome, current, f"did not end within {wait_s:.0f} s")
                outcome.n_late += bool(current)
                break
            if message is None:
                ended = child.how_it_ended()
                if current or ended:
                    _fail(outcome, current, ended or "the process ended without a word")
                break
            if "unable" in message:
                outcome.unfinished = message["unable"]
                break
            if "cases" in message:
                outcome.cases = message["cases"]
            elif "begin" in message:
                current = message["begin"]
                tell(current, len(outcome.done), len(outcome.cases))
            else:
                _note(outcome, current, message)
                current = ""
    outcome.stuck = child.stuck
    if child.stuck:
        outcome.unfinished = "a process could not be ended: the driver holds it"
    return not outcome.unfinished and (not outcome.cases or len(outcome.done) < len(outcome.cases))


def _note(outcome: Outcome, case: str, message: dict[str, Any]) -> None:
    outcome.done.append(case)
    outcome.rows += message["rows"]
    if "left_out" in message:
        outcome.left_out.append((case, message["left_out"]))
    if "failed" in message:
        outcome.failed.append((case, message["failed"]))


def _fail(outcome: Outcome, case: str, why: str) -> None:
    """Record the case that ended its process. If `case` is empty, the part could not start."""
    if case:
        outcome.done.append(case)
        outcome.failed.append((case, why))
    else:
        outcome.unfinished = why


def deal(shares: Sequence[float], seconds: float, began: float) -> list[float]:
    total, spent, ends = sum(shares), 0.0, []
    for share in shares:
        spent += share
        ends.append(began + seconds * spent / total)
    return ends
