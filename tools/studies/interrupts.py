"""Tests Ctrl-C at random moments: `python -m vkbackend.tools.studies.interrupts -dev 0 -dev numpy -n 100`.

A model is interrupted while it is loaded, reads a prompt, decodes, saves or loads a state, or is closed.
After each interrupt, the same process must generate known tokens. Counts wrong tokens, errors, leaks, hangs
and crashes, and exits with 1 if a count is not 0.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from queue import Empty, SimpleQueue
from typing import Any

from vkbackend.checks import whole_number
from vkbackend.tools.console import console, table
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.measure.turns import exit_on_errors
from vkbackend.tools.studies.interrupt_rounds import PHASES

ROUNDS = [sys.executable, "-m", "vkbackend.tools.studies.interrupt_rounds"]
BATCH = 200  # rounds per process
FAULTS = ("wrong", "error", "left", "hang", "crash")


class Batch:
    def __init__(self, args: argparse.Namespace, devices: str, folder: str, first: int, count: int) -> None:
        words = args.model, devices, args.process, folder, args.seed, first, count
        self.process = subprocess.Popen(
            [*ROUNDS, *map(str, words)], stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def line(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next line, or None at the end. Raises queue.Empty on timeout."""
        text = self._lines.get(timeout=timeout_s)
        return None if text is None else json.loads(text)

    def end(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # The process prints its stacks.
            return self.process.wait()


def study(args: argparse.Namespace, devices: str, folder: str) -> dict[str, Counter[str]]:
    counts = {phase: Counter[str]() for phase in PHASES}
    at = raised = 0
    while raised < args.count:
        batch = Batch(args, devices, folder, at, min(BATCH, args.count - raised))
        phase, ended = "load", False
        try:
            while (line := batch.line(args.deadline)) is not None:
                phase, ended = line["phase"], "raised" in line
                at = line["round"] + 1
                if ended:
                    counts[phase]["rounds"] += 1
                    counts[phase]["interrupts"] += line["raised"]
                    raised += line["raised"]
                    if line["wrong"]:
                        counts[phase][line["wrong"].partition(":")[0]] += 1
                        sys.stderr.write(f"{devices} {phase}, round {line['round']}: {line['wrong']}\n")
            code = batch.end(args.deadline)
            fault = "crash" if code else ""
        except Empty:
            code, fault = batch.end(0), "hang"
        if fault:
            counts[phase][fault] += 1
            sys.stderr.write(f"{devices} {phase}, round {at - 1}: {fault}, the process ended with {code}\n")
            if not any(count["rounds"] for count in counts.values()):
                break
        bad = sum(count[name] for count in counts.values() for name in FAULTS)
        sys.stderr.write(f"{devices}: {raised} of {args.count} interrupts, {bad} faults\n")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vkbackend.tools.studies.interrupts", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("-m", "--model", default=demo_model(), metavar="FILE", help="a .gguf file (default: the demo model)")
    add("-dev", "--device", action="append", metavar="LIST", help="devices; may be repeated (default: 0)")
    add("-n", "--count", type=int, default=40, metavar="N", help="interrupts per device list (default: 40)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the moments (default: 0)")
    add("--process", action="store_true", help="the engine in a process of its own")
    add("--deadline", type=int, default=120, metavar="SECONDS",
        help="seconds after which a round counts as hung (default: 120)")  # fmt: skip
    args = parser.parse_args()
    whole_number("-n", args.count, 1, 1 << 30)
    whole_number("--deadline", args.deadline, 1, 1 << 30)
    rows, total = [], Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for devices in args.device or ["0"]:
            for phase, count in study(args, devices, folder).items():
                total += count
                rows.append([devices, phase, *(count[name] for name in ("rounds", "interrupts", *FAULTS))])
    rows.append(["all", "", *(total[name] for name in ("rounds", "interrupts", *FAULTS))])
    columns = "devices", "phase", "rounds", "interrupts", *FAULTS
    console().print(table("interrupts", columns, rows))
    return int(any(total[name] for name in FAULTS))


if __name__ == "__main__":
    with exit_on_errors():
        sys.exit(main())
