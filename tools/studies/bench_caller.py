"""Measures how a busy Python thread slows all-reduces: `python -m vkbackend.tools.studies.bench_caller`.

In one process, the caller and the engine share Python's global interpreter lock (GIL), so the relay between
segments waits for the caller. If process=True, the engine has its own GIL. Prints median microseconds per
all-reduce for an idle and a busy caller.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading

from vkbackend.models.arguments import device_list
from vkbackend.models.llm import LLM
from vkbackend.tools.console import console, table
from vkbackend.tools.flags.text import demo_model


def reduce_us(llm: LLM, n_predict: int, repeats: int) -> float:
    runs = (
        llm.generate([1], max_tokens=n_predict, temperature=0, ignore_eos=True).timings
        for _ in range(repeats)
    )
    return statistics.median(timings["reduce_us"] for timings in runs)


def measure(
    path: str, devices: tuple[str, ...], process: bool, n_predict: int, repeats: int
) -> tuple[float, float]:
    with LLM(path, devices=devices, process=process) as llm:
        reduce_us(llm, n_predict, 1)  # warm-up
        quiet = reduce_us(llm, n_predict, repeats)
        stop = threading.Event()

        def spin() -> None:
            while not stop.is_set():
                sum(range(1000))

        thread = threading.Thread(target=spin)
        thread.start()
        try:
            return quiet, reduce_us(llm, n_predict, repeats)
        finally:
            stop.set()
            thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vkbackend.tools.studies.bench_caller", description=__doc__
    )
    parser.add_argument(
        "-m", "--model", default=None, metavar="FILE", help="the model (default: the demo model)"
    )
    parser.add_argument("-dev", "--device", default="0,0", metavar="LIST", help="at least two (default: 0,0)")
    parser.add_argument(
        "-n", "--n-predict", type=int, default=64, metavar="N", help="tokens per run (default: 64)"
    )
    parser.add_argument(
        "-r", "--repeats", type=int, default=5, metavar="N", help="runs of each kind (default: 5)"
    )
    args = parser.parse_args()
    rows = []
    for process in (False, True):
        devices = device_list("devices", args.device) or ("0", "0")
        quiet, busy = measure(args.model or demo_model(), devices, process, args.n_predict, args.repeats)
        rows.append((str(process), f"{quiet:.1f}", f"{busy:.1f}", f"{busy / quiet:.2f}"))
    columns = ("process", "quiet us/reduce", "busy us/reduce", "ratio")
    console(stderr=False).print(table("a busy caller", columns, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
