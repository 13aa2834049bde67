"""Whether memory grows: `python -m vkbackend.tools.studies.soak -m model.gguf -dev 0 --minutes 20`.

Threads ask one LLM for random things: text and ids, streams closed or dropped in the middle, logits, states
saved, loaded and copied, damaged states, arguments that are refused. They pause once per interval, while it
prints what the process has after malloc_trim and what we keep; in the end, what Python types have grown.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from vkbackend.checks import whole_number
from vkbackend.errors import VkbackendError
from vkbackend.models.arguments import device_list
from vkbackend.models.engine.engine import Engine
from vkbackend.models.llm import LLM
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.measure.turns import errors_told, table

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MIB = 1 << 20
MOST_TYPES, MOST_LINES = 12, 15
CACHES = type(cache(len))  # of functools


class Caller:
    """One thread's random requests; `done` counts them by kind, `failed` those that raised typed errors."""

    def __init__(self, llm: LLM, folder: Path, seed: int) -> None:
        self.llm, self.folder, self.rng = llm, folder, random.Random(seed)
        # Held for each request: whoever measures takes it, because gc.get_objects shows tuples that another
        # thread has not finished, which Python then refuses to finish.
        self.turn = threading.Lock()
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.unexpected: BaseException | None = None
        self._kept: list[Any] = []  # streams that nobody reads, dropped some requests later

    def run(self, until: float) -> None:
        kinds = [self.generate, self.generate, self.stream, self.logits, self.state, self.bad, self.text]
        try:
            while time.monotonic() < until:
                kind = self.rng.choice(kinds)
                self.done[kind.__name__] += 1
                try:
                    with self.turn:
                        kind()
                except VkbackendError as error:
                    self.failed[type(error).__name__] += 1
        except BaseException as error:
            self.unexpected = error
            raise
        finally:
            self._kept.clear()

    def ids(self, most: int = 0) -> list[int]:
        n = self.rng.randrange(1, most or self.llm.n_ctx // 4)
        return [self.rng.randrange(self.llm.n_vocab) for _ in range(n)]

    def words(self) -> str:
        return " ".join("".join(self.rng.choices(LETTERS, k=self.rng.randrange(1, 9))) for _ in range(20))

    def options(self) -> dict[str, Any]:
        rng = self.rng
        return {
            "temperature": rng.choice([0, 0.8, 1.5]),
            "top_k": rng.choice([0, 1, 40]),
            "repeat_penalty": rng.choice([1.0, 1.1]),
            "stop": rng.choice([(), ("a",), ("the end", "xyz")]),
            "slot": rng.choice([None, rng.randrange(self.llm.n_slots)]),
        }

    def generate(self) -> None:
        prompt = self.words() if self.rng.random() < 0.5 else self.ids()
        self.llm.generate(prompt, self.rng.randrange(12), **self.options())

    def stream(self) -> None:
        """Closed, dropped while it is read, or never read; some go on beside others."""
        stream = self.llm.stream(self.ids(), 20, **self.options())
        for _ in range(self.rng.randrange(8)):
            next(stream, None)
        if self.rng.random() < 0.3:
            self._kept.append(stream)
            del self._kept[: -self.rng.randrange(1, 3)]
        elif self.rng.random() < 0.5:
            stream.close()

    def logits(self) -> None:
        self.llm.logits(self.ids(self.rng.choice([4, 40])))

    def state(self) -> None:
        rng, slots = self.rng, range(self.llm.n_slots)
        path, slot = self.folder / f"{rng.randrange(8)}.state", rng.choice(slots)
        kind = rng.randrange(4)
        if kind == 0:
            self.llm.copy_slot(slot, rng.choice(slots))
        elif kind == 1:
            self.llm.save_state(path, slot)
        elif kind == 2:
            self.llm.load_state(path, slot)
        else:
            raw = bytearray(path.read_bytes() if path.exists() else b"nothing")
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            damaged = self.folder / f"damaged-{threading.get_ident()}"
            damaged.write_bytes(raw)
            self.llm.load_state(damaged, slot)

    def bad(self) -> None:
        llm = self.llm
        wrong: list[Any] = [
            lambda: llm.generate([]),
            lambda: llm.generate([llm.n_vocab]),
            lambda: llm.generate([1] * (llm.n_ctx + 1)),
            lambda: llm.generate([1], 1, temperature=float("nan")),
            lambda: llm.generate([1], 1, slot=llm.n_slots),
            lambda: llm.stream([1], top_p=2.0),
            lambda: llm.generate("x" * 5_000),
            lambda: llm.load_state(self.folder / "missing"),
            lambda: llm.load_state(self.folder),
            lambda: llm.save_state(self.folder / "no" / "folder"),
            lambda: llm.copy_slot(0, -1),
            lambda: llm.logits([-1]),
        ]
        self.rng.choice(wrong)()

    def text(self) -> None:
        self.llm.detokenize(self.llm.tokenize(self.words() + "\U0001f600"))
        self.llm.memory()


def measured() -> dict[str, float]:
    """Sizes of the process and of what the one engine in it keeps, after the garbage is gone."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc
        trim(0)
    status = Path("/proc/self/status").read_text()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in status.splitlines() if line.endswith(" kB")}
    objects = gc.get_objects()
    (engine,) = (o for o in objects if isinstance(o, Engine))
    mesh = engine.runner.mesh
    return {
        "RSS": kib["VmRSS"] / 1024,
        "anonymous": kib["RssAnon"] / 1024,
        "objects": len(objects),
        "cached": sum(o.cache_info().currsize for o in objects if isinstance(o, CACHES)),
        "steps": len(mesh._steps),
        "made": sum(sum(device.counts.values()) for device in mesh.devices),
        "device MiB": sum(sum(device.nbytes.values()) for device in mesh.devices) / MIB,
        "in work": len(engine._by_id),
        "held": sum(len(content.tokens) for content in engine.scheduler.contents),
        "cells": engine.stats()["cells_used"],
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def types() -> Counter[str]:
    return Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects())


def soak(llm: LLM, minutes: float, interval_s: float, n_threads: int, seed: int, trace: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        callers = [Caller(llm, Path(folder), seed + i) for i in range(n_threads)]
        began = time.monotonic()
        until = began + 60 * minutes
        threads = [threading.Thread(target=caller.run, args=(until,), daemon=True) for caller in callers]
        rows: list[list[object]] = []
        before: Counter[str] | None = None
        lines: tracemalloc.Snapshot | None = None
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(max(0.0, min(until, began + interval_s * (len(rows) + 1)) - time.monotonic()))
            with ExitStack() as pause:
                for caller in callers:
                    pause.enter_context(caller.turn)
                found = measured()
                if before is None and time.monotonic() - began > (until - began) / 4:
                    before = types()
                    lines = tracemalloc.take_snapshot() if trace else None
            n_done = sum(sum(caller.done.values()) for caller in callers)
            rows.append([(time.monotonic() - began) / 60, n_done, *(round(x, 1) for x in found.values())])
            named = zip(("min", "asked", *found), rows[-1], strict=True)
            sys.stdout.write("  ".join(f"{name} {value:.1f}" for name, value in named) + "\n")
            sys.stdout.flush()
        table("memory, MiB, and what we keep", ("min", "asked", *found), rows)
        table("asked", ("kind", "times"), sum((c.done for c in callers), Counter()).most_common())
        table("refused", ("error", "times"), sum((c.failed for c in callers), Counter()).most_common())
        if before:
            grown = (types() - before).most_common(MOST_TYPES)
            table("more objects than after a quarter", ("type", "more"), grown)
        if lines:
            changed = tracemalloc.take_snapshot().compare_to(lines, "lineno")
            more = [[str(s.traceback), s.size_diff / 1024] for s in changed if s.size_diff > 0]
            table("KiB more", ("line", "KiB"), more[:MOST_LINES])
        for caller in callers:
            if caller.unexpected:
                raise caller.unexpected


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("-m", "--model", default=demo_model(), help="a .gguf file (default: the demo model)")
    add("-dev", "--device", default="0", metavar="LIST", help="(default: 0)")
    add("--minutes", type=float, default=20.0, help="(default: 20)")
    add("--interval", type=float, default=60.0, metavar="S", help="seconds between lines (default: 60)")
    add("-t", "--threads", type=int, default=6, help="callers at once (default: 6)")
    add("--slots", type=int, default=4, help="(default: 4)")
    add("--seed", type=int, default=0, help="(default: 0)")
    add("--trace", action="store_true", help="tell the lines that allocated more, too; twice as slow")
    args = parser.parse_args()
    with errors_told():
        n_threads = whole_number("--threads", args.threads, 1, 64)
        slots = whole_number("--slots", args.slots, 1, 64)
        if args.trace:
            tracemalloc.start()
        with LLM(
            args.model, devices=device_list("--device", args.device), n_ctx=128, n_slots=slots, n_ubatch=64
        ) as llm:
            soak(llm, args.minutes, args.interval, n_threads, args.seed, args.trace)
    return 0


if __name__ == "__main__":
    sys.exit(main())
