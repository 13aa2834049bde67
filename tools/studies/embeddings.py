"""Measures embeddings per second in batches of 1, 16 and 64: `python -m vkbackend.tools.studies.embeddings -m
model.gguf`.

A batch is one request of n texts with `-l` tokens each, pooled by the mean. Batch sizes alternate, so that
other load slows all of them. `--compare llama-cpp` alternates with llama-cpp-python on the same file and
device. `--synthetic minilm:F16` measures random weights. The CPU time of a software device depends less on
other load than its speed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from vkbackend.checks import whole_number
from vkbackend.models.embeddings.pooling import Pooled
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Embed, Event
from vkbackend.tools.flags.runner import add_model_arguments, open_models, open_runner
from vkbackend.tools.measure.compare import LlamaCpp, check_comparable
from vkbackend.tools.measure.turns import exit_on_errors, table

SIZES = 1, 16, 64


def embed(engine: Engine, texts: Sequence[Sequence[int]], first_id: int) -> np.ndarray:
    pooled = {first_id + i: Pooled("mean") for i in range(len(texts))}
    for id_, text in zip(pooled, texts, strict=True):
        engine.submit(Embed(id_, tuple(text)))
    while engine.busy:
        news = engine.step()
        for id_, answer in zip(news.ids, news.answers, strict=True):
            assert isinstance(answer, Event)
            if answer.error:
                raise answer.error.exception()
            pooled[id_].push(answer)
    return np.stack([each.result() for each in pooled.values()])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_arguments(parser)
    parser.add_argument("-l", "--length", type=int, default=32, help="tokens of a text (default: 32)")
    parser.add_argument("-r", "--rounds", type=int, default=5, help="rounds of turns (default: 5)")
    parser.add_argument(
        "--compare", choices=["llama-cpp"], help="alternate with llama-cpp-python on the same file and device"
    )
    args = parser.parse_args(argv)
    with exit_on_errors(), ExitStack() as stack:
        length = whole_number("--length", args.length, 1, 512)
        rounds = whole_number("--rounds", args.rounds, 1, 10_000)
        if args.compare:
            check_comparable(args)
        for gguf in open_models(args, stack):
            runner = open_runner(gguf, args, n_ctx=length + 1, n_slots=max(SIZES), prefix_cache=False)
            with ExitStack() as opened:
                engine = Engine(runner)
                opened.callback(engine.close)
                n_ctx = max(SIZES) * length
                other = (
                    opened.enter_context(LlamaCpp(gguf, runner, n_ctx, max(SIZES))) if args.compare else None
                )
                measure(engine, other, str(gguf.paths[0]), length, rounds)


def measure(engine: Engine, other: LlamaCpp | None, name: str, length: int, rounds: int) -> None:
    rng = np.random.default_rng(0)
    texts = rng.integers(0, engine.runner.n_vocab, (max(SIZES), length)).tolist()
    took: dict[int, list[tuple[float, float]]] = {n: [] for n in SIZES}  # seconds, of CPU time
    theirs: dict[int, list[tuple[float, float]]] = {n: [] for n in SIZES}
    steps: dict[int, int] = {}
    n_asked, error = 0, 0.0
    for turn in range(rounds + 1):  # the first turn compiles
        for n in SIZES:
            before, began, cpu = engine.stats()["n_steps"], time.perf_counter(), time.process_time()
            ours = embed(engine, texts[:n], n_asked)
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            steps[n] = engine.stats()["n_steps"] - before
            n_asked += n
            if turn:
                took[n].append((seconds, cpu))
            if other:
                seconds, cpu, vectors = other.embed(texts[:n])
                error = max(error, float(((vectors - ours) ** 2).sum() / (ours**2).sum()))
                if turn:
                    theirs[n].append((seconds, cpu))
    single = statistics.median(seconds for seconds, _ in took[1])
    rows: list[tuple[float, ...]] = []
    for n in SIZES:
        seconds, cpu = medians(took[n])
        row: tuple[float, ...] = n, steps[n], n / seconds, n / seconds * length, n / seconds * single
        row += (1e3 * cpu / n,)
        if other:
            other_s, other_cpu = medians(theirs[n])
            row += n / other_s, other_s / seconds, 1e3 * other_cpu / n, other_cpu / cpu
        rows.append(row)
    columns = ["texts", "steps", "texts/s", "tokens/s", "of one at a time", "CPU ms/text"]
    title = f"{name}: texts of {length} tokens, medians of {rounds} rounds"
    if other:
        columns += ["llama.cpp texts/s", "ratio", "llama.cpp CPU ms/text", "ratio"]
        title += f"; llama-cpp-python {other.build['version']}, NMSE of its embeddings {error:.2g}"
    table(title, columns, rows)


def medians(turns: Sequence[tuple[float, float]]) -> tuple[float, float]:
    seconds, cpu = zip(*turns, strict=True)
    return statistics.median(seconds), statistics.median(cpu)


if __name__ == "__main__":
    main()
