"""Measures the gain of two steps in flight over two nodes: `python -m vkbackend.tools.studies.pipeline`.

The nodes are two threads of one process. Each node's device sleeps instead of multiplying by weights. Prints
total tokens per second with one step in flight and with two.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import vkbackend.models.engine.runner.runner as runners
from vkbackend.checks import whole_number
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Generate
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.recording import Dispatch
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.measure.turns import exit_on_errors, table
from vkbackend.tools.measure.twin_nodes import twin_runner
from vkbackend.twins.device import HostQueue, NullDevice

N_TOKENS = 24  # Timed tokens per sequence and round, after N_WARM untimed tokens.
N_WARM = 4


class Sleeping(NullDevice):
    """A device that sleeps `seconds` per segment, or per row if `per_row`. Logits are 0."""

    seconds, per_row = 0.0, False

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.queue = _Sleep(self)

    def buffer(self, *args: Any) -> Any:
        buffer = super().buffer(*args)
        buffer.host[:] = 0
        return buffer


class _Sleep(HostQueue):
    def submit(self, executable: Any, first: int, count: int) -> None:
        rows = int(executable.recording.name.partition("rows=")[2].split()[0])
        each = Sleeping.seconds * (rows if Sleeping.per_row else 1)
        for s in range(first, first + count):
            ops = [command.op for command in executable.segments[s] if isinstance(command, Dispatch)]
            self._pending.append((s > 0, [each] if any(op.startswith("mat_") for op in ops) else []))
        self.submitted += count
        self._run()

    def _run(self) -> None:
        while self._pending and (not self._pending[0][0] or self._done < self._allowed):
            for seconds in self._pending.pop(0)[1]:
                time.sleep(seconds)
            self._done += 1


def rate(engine: Engine, n: int, turn: int) -> float:
    greedy = SamplingParams(temperature=0)
    for i in range(n):
        engine.submit(Generate(turn * n + i, (1 + i, 2, 3 + turn), N_WARM + N_TOKENS, greedy))
    got, began, counted = 0, 0.0, 0
    while engine.busy:
        news = engine.step()
        got += sum(isinstance(answer, int) or answer.token is not None for answer in news.answers)
        if not began and got >= N_WARM * n:
            began, counted = time.perf_counter(), got
        if got >= N_TOKENS * n:
            break
    took, tokens = time.perf_counter() - began, got - counted
    while engine.busy:
        engine.step()
    return tokens / took


def compare(model: str, n: int, n_ubatch: int, rounds: int) -> tuple[float, float]:
    options: dict[str, Any] = {
        "split_mode": "layer",
        "n_ctx": 64,
        "n_slots": n,
        "n_ubatch": n_ubatch,
        "prefix_cache": False,
    }
    rates_of: dict[int, list[float]] = {1: [], 2: []}
    with twin_runner(model, ["0/sleep", "1/sleep"], **options) as runner:
        engine = Engine(_most(runner, 2))
        for turn in range(-1, rounds):
            for n_in_flight, rates in rates_of.items():
                _most(runner, n_in_flight)
                tokens_per_s = rate(engine, n, 2 * turn + n_in_flight + 2)
                if turn >= 0:
                    rates.append(tokens_per_s)
    return statistics.median(rates_of[1]), statistics.median(rates_of[2])


def _most(runner: Runner, n_in_flight: int) -> Runner:
    runner.n_in_flight = n_in_flight
    return runner


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default=demo_model(), help="GGUF file (default: the demo model)")
    parser.add_argument("-n", "--sequences", type=int, default=8, help="that decode (default: 8)")
    parser.add_argument("-t", "--ms", type=int, default=10, help="a segment sleeps so long (default: 10)")
    parser.add_argument("-r", "--rounds", type=int, default=3, help="turns of each (default: 3)")
    args = parser.parse_args(argv)
    with exit_on_errors():
        n = whole_number("-n", args.sequences, 2, 64)
        seconds = whole_number("-t", args.ms, 1, 1000) / 1e3
        runners.open_devices = lambda words, *_, **__: [Sleeping(word) for word in words]
        rows = []
        for how, per_row, n_ubatch in (
            (f"{args.ms} ms a segment, at most {-(-n // 2)} rows a step", False, -(-n // 2)),
            (f"{args.ms} ms a segment, all rows in a step", False, 64),
            (f"{args.ms / n:.3g} ms a row of a segment", True, 64),
        ):
            Sleeping.per_row, Sleeping.seconds = per_row, seconds / n if per_row else seconds
            single, two = compare(args.model, n, n_ubatch, args.rounds)
            rows.append((how, single, two, two / single))
        columns = "each host sleeps", "one step on its way", "two", "ratio"
        table(f"tokens/s of {n} sequences over two hosts", columns, rows)


if __name__ == "__main__":
    main()
