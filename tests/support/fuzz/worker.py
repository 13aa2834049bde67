"""A separate process that checks cases, because a case may crash or hang it."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

from fuzz.kind import Kind, Wrong

START_S = 120.0
START = "import sys; sys.path[:] = sys.argv[3:]; from fuzz.worker import serve; serve(*sys.argv[1:3])"


def kind_of(name: str) -> type[Kind]:
    module, _, attribute = name.partition(":")
    kind: type[Kind] = getattr(importlib.import_module(module), attribute)
    return kind


def fault_of(kind: Kind, case: bytes) -> tuple[str, str]:
    """Return how the case ended, and its fault ("" without a fault)."""
    try:
        return kind.check(case), ""
    except Wrong as error:
        return "wrong", f"Wrong: {error}"
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
        at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
        return "wrong", f"{type(error).__name__} at {at}: {error}"


def serve(path: str, folder: str) -> None:
    """Check the cases that arrive on standard input, which is a socket."""
    pipe = Connection(os.dup(0))
    kind = kind_of(path)(Path(folder))
    pipe.send(("ready", ""))
    while True:
        pipe.send(fault_of(kind, pipe.recv()))


class Worker:
    """Starts the process for the first case, after a crash, and after a hang."""

    def __init__(self, path: str, deadline_s: float) -> None:
        self._path, self._deadline_s = path, deadline_s
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, case: bytes) -> tuple[str, str]:
        process = self._process or self._start()
        try:
            self._pipe.send(case)
            if self._pipe.poll(self._deadline_s):
                outcome: tuple[str, str] = self._pipe.recv()
                return outcome
            fault = f"hang: no end after {self._deadline_s:.0f} s"
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            fault = f"crash: exit code {process.returncode}"
        self.close()
        return "wrong", fault

    def _start(self) -> subprocess.Popen[bytes]:
        pipe, theirs = socket.socketpair()
        self._folder = TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True)
        with theirs, open(Path(self._folder.name) / "stderr.txt", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, self._path, self._folder.name, *sys.path],
                stdin=theirs.fileno(), stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._pipe = Connection(pipe.detach())
        try:
            if self._pipe.poll(START_S):
                self._pipe.recv()
                return self._process
        except EOFError:
            pass
        why = (Path(self._folder.name) / "stderr.txt").read_text(encoding="utf-8")
        self.close()
        raise SystemExit(f"the worker of {self._path} did not start in {START_S:.0f} s: {why}")

    def size(self) -> tuple[float, int]:
        assert self._process is not None
        process = Path(f"/proc/{self._process.pid}")
        pages = int((process / "statm").read_text(encoding="utf-8").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(list((process / "fd").iterdir()))

    def close(self) -> None:
        if self._process is None:
            return
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()
        self._folder.cleanup()
        self._process = None
