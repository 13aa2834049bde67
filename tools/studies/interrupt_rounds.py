"""Runs the rounds of interrupts.py, in a process that may hang or crash.

Each round sends SIGINT at a random moment of a call of `LLM`, sometimes twice. After each round, the model
must generate known tokens. The process prints a JSON line before each round and one with its result.
"""

from __future__ import annotations

import _thread
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from types import FrameType

from vkbackend.errors import VkbackendError
from vkbackend.models.llm import LLM
from vkbackend.runtime import Device

PHASES = ("load", "prefill", "decode", "stream", "state", "close")
WEIGHTS = (2, 2, 4, 2, 1, 1)  # weights of the PHASES for the random choice
N_CTX, N_PROMPT, N_DECODE, N_CHECKED = 128, 96, 12, 6
AGAIN = 0.3  # Share of rounds with two interrupts.
AGAIN_S = 0.003  # Longest time between two interrupts.
BEYOND = 1.2  # Latest interrupt, as a multiple of the call's duration.
RELEASED_S = 30.0  # Limit for freeing the objects of an interrupted call.


class Striker:
    """A thread that interrupts the main thread. Interrupts that arrive between rounds raise nothing."""

    def __init__(self) -> None:
        self.armed = self.pending = False
        self.raised = 0
        self._orders: SimpleQueue[tuple[list[float], bool]] = SimpleQueue()
        signal.signal(signal.SIGINT, self._on_signal)
        threading.Thread(target=self._work, daemon=True).start()

    def _on_signal(self, _: int, __: FrameType | None) -> None:
        if self.armed:
            self.raised += 1
            raise KeyboardInterrupt

    def _work(self) -> None:
        while True:
            waits, as_signal = self._orders.get()
            for wait_s in waits:
                time.sleep(wait_s)
                if as_signal:
                    os.kill(os.getpid(), signal.SIGINT)
                else:
                    _thread.interrupt_main()
            self.pending = False

    def strike(self, call: Callable[[], object], waits: list[float], as_signal: bool) -> int:
        self.raised, self.pending, self.armed = 0, True, True
        with suppress(KeyboardInterrupt):  # A second interrupt may come during `_wait`.
            try:
                self._orders.put((waits, as_signal))
                call()
                self._wait()
            except KeyboardInterrupt:
                self._wait()
        self.armed = False
        self._wait()
        return self.raised

    def _wait(self) -> None:
        while self.pending:
            time.sleep(0.0005)
        time.sleep(0.0005)  # A pending KeyboardInterrupt is raised here.


class Rounds:
    """Runs rounds on a model that stays open. Rounds that open or close a model use another model."""

    def __init__(self, path: str, devices: list[str], process: bool, folder: str) -> None:
        self._path = path
        self._options = {"devices": devices, "process": process, "n_ctx": N_CTX, "n_slots": 2, "n_ubatch": 32}
        self._state = os.path.join(folder, f"{os.getpid()}.state")
        self.llm = self.open()
        self._prompts = [[1 + (7 * i + k * k) % (self.llm.n_vocab - 1) for k in range(9)] for i in range(5)]
        self._long = [1 + k % (self.llm.n_vocab - 1) for k in range(N_PROMPT)]
        self._known = [self.tokens(self.llm, i) for i in range(len(self._prompts))]
        calls = {
            "load": lambda: self.open().close(),
            "prefill": lambda: self.llm.generate(self._long, 1, temperature=0),
            "decode": lambda: self.generate(0, 0),
            "stream": lambda: self.read(0, 0),
            "state": self.move_state,
        }
        self.seconds = {phase: _seconds(call) for phase, call in calls.items()}
        self.seconds["close"] = 0.3 * self.seconds["load"]
        self._n_open = _n_open()

    def open(self) -> LLM:
        return LLM(self._path, **self._options)  # type: ignore[arg-type]

    def tokens(self, llm: LLM, i: int, slot: int | None = None) -> list[int]:
        return llm.generate(self._prompts[i], N_CHECKED, temperature=0, ignore_eos=True, slot=slot).tokens

    def generate(self, i: int, slot: int | None) -> None:
        self.llm.generate(self._prompts[i], N_DECODE, temperature=0, ignore_eos=True, slot=slot)

    def read(self, i: int, slot: int | None) -> None:
        for _ in self.llm.stream(self._prompts[i], N_DECODE, temperature=0, ignore_eos=True, slot=slot):
            pass

    def move_state(self) -> None:
        self.llm.save_state(self._state, 0)
        self.llm.load_state(self._state, 1)
        self.llm.copy_slot(1, 0)

    def run(self, phase: str, rng: random.Random, striker: Striker) -> tuple[int, str]:
        """Return the number of KeyboardInterrupts, and a description of any fault."""
        i, slot = rng.randrange(len(self._prompts)), rng.choice((None, 0, 1))
        waits = [rng.uniform(0, BEYOND * self.seconds[phase])]
        if rng.random() < AGAIN:
            waits.append(rng.uniform(0, AGAIN_S))
        opened: list[LLM] = [self.open()] if phase == "close" else []
        calls: dict[str, Callable[[], object]] = {
            "load": lambda: opened.append(self.open()),
            "prefill": lambda: self.llm.generate(self._long[i:], 1, temperature=0, slot=slot),
            "decode": lambda: self.generate(i, slot),
            "stream": lambda: self.read(i, slot),
            "state": self.move_state,
            "close": lambda: opened[0].close(),
        }
        raised = striker.strike(calls[phase], waits, rng.random() < 0.7)
        return raised, self._fault_of(opened, rng.randrange(len(self._prompts)), rng.choice((None, 0, 1)))

    def _fault_of(self, opened: list[LLM], i: int, slot: int | None) -> str:
        try:
            for llm in opened:
                llm.close()
            if opened and not _refuses(opened[0]):
                return "a closed model answers"
            opened.clear()
            got, want = self.tokens(self.llm, i, slot), self._known[i]
            if got != want:
                return f"wrong: {got}, not {want}"
        except Exception as error:
            return f"error: {error!r}"
        deadline = time.monotonic() + RELEASED_S
        while (n := _n_open()) != self._n_open:
            if time.monotonic() > deadline:
                return f"left: {n} devices or engines are open, not {self._n_open}"
            time.sleep(0.01)
        return ""


def _refuses(llm: LLM) -> bool:
    try:
        llm.generate([1], 1)
    except VkbackendError:
        return True
    return False


def _n_open() -> int:
    gc.collect()
    devices = sum(isinstance(thing, Device) and bool(thing.counts) for thing in gc.get_objects())
    return devices + sum(thread.name == "vkbackend-engine" for thread in threading.enumerate())


def _seconds(call: Callable[[], object]) -> float:
    call()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main(path: str, devices: str, process: str, folder: str, seed: str, first: str, count: str) -> None:
    faulthandler.enable()  # SIGABRT ends a hang
    rounds, striker = Rounds(path, devices.split(","), process == "True", folder), Striker()
    for n in range(int(first), int(first) + int(count)):
        rng = random.Random(f"{seed} {devices} {process} {n}")
        (phase,) = rng.choices(PHASES, WEIGHTS)
        sys.stdout.write(json.dumps({"round": n, "phase": phase}) + "\n")
        sys.stdout.flush()
        raised, wrong = rounds.run(phase, rng, striker)
        sys.stdout.write(json.dumps({"round": n, "phase": phase, "raised": raised, "wrong": wrong}) + "\n")
        sys.stdout.flush()
    rounds.llm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
