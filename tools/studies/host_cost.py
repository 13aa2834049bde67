"""Measures host time per decoded token: `python -m vkbackend.tools.studies.host_cost -m model.gguf`.

The devices compute nothing, so only Python takes time: the engine's step, sampling, and delivery of answers.
Prints minimum microseconds of CPU time per token for each number of sequences. `--against CHECKOUT`
alternates runs of this checkout and of another checkout. The other checkout needs a .venv.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

SIZES = 1, 4, 16, 64
STEPS = 150
WAYS = {"greedy": {"temperature": 0.0}, "default": {}}


def measure(path: str, n: int, sampling: dict[str, Any]) -> float:
    import vkbackend.models.engine.messages as messages
    import vkbackend.models.engine.runner.runner as runners
    from vkbackend.models.engine.channel import Channel, Letter
    from vkbackend.models.engine.engine import Engine
    from vkbackend.models.options import Options
    from vkbackend.twins.device import HostQueue, NullDevice

    class Idle(HostQueue):
        def _run(self) -> None:
            while self._pending and (not self._pending[0][0] or self._done < self._allowed):
                self._pending.pop(0)
                self._done += 1

    class Zeros(NullDevice):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.queue = Idle(self)

        def buffer(self, *args: Any) -> Any:
            buffer = super().buffer(*args)
            if buffer.host is not None:
                buffer.host[:] = 0
            return buffer

    runners.open_devices = lambda *_, **__: [Zeros("null")]
    engine = Engine.open(Options(path, devices=("numpy",), n_ctx=STEPS + 64, n_slots=n, n_ubatch=64))
    channel = Channel()
    keep = []
    for i in range(n):
        # every checkout has SamplingParams in messages.py
        kind: Any = messages.SamplingParams
        request = messages.Generate(i, (1, 2, 3), None, kind(seed=i, **sampling))
        mail: Any = SimpleQueue()
        keep.append(mail)
        if taken := channel.sort(Letter(i, request, mail, True)):
            engine.submit(taken)
    for _ in range(20):
        channel.deliver(engine.step())
    began = time.thread_time()
    for _ in range(STEPS):
        channel.deliver(engine.step())
    took = time.thread_time() - began
    engine.close()
    return 1e6 * took / (STEPS * n)


def all_of(python: str, path: str) -> dict[str, float]:
    done = subprocess.run(
        [python, __file__, "-m", path, "--once"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )
    if done.returncode:
        sys.exit(f"error: {python} failed:\n{done.stderr}")
    times: dict[str, float] = json.loads(done.stdout)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", required=True, help="GGUF file")
    parser.add_argument("-r", "--rounds", type=int, default=5, help="processes of each (default: 5)")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout to compare with")
    parser.add_argument("--once", action="store_true", help="measure in this process and print JSON")
    args = parser.parse_args()
    if args.once:
        times = {f"{way} {n}": measure(args.model, n, how) for n in SIZES for way, how in WAYS.items()}
        sys.stdout.write(json.dumps(times))
        return
    from vkbackend.tools.measure.turns import least_and_median, table

    pythons = {"here": sys.executable}
    if args.against:
        pythons["there"] = str(args.against / ".venv/bin/python")
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    for _ in range(args.rounds):
        for name, python in pythons.items():
            rounds[name].append(all_of(python, args.model))
    rows = []
    for key in rounds["here"][0]:
        way, n = key.split()
        both = [least_and_median([times[key] for times in rounds[name]]) for name in reversed(pythons)]
        ratios = [here / there for there, here in zip(both[0], both[-1], strict=True)]
        cells = [x for pair in both for x in pair]
        rows.append((n, way, *cells, *(ratios if args.against else [])))
    columns = ["sequences", "sampling"]
    columns += [f"us {name}, {kind}" for name in reversed(pythons) for kind in ("least", "median")]
    table("CPU time per token", [*columns, *(["ratio of least", "of median"] if args.against else [])], rows)


if __name__ == "__main__":
    main()
