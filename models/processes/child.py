"""The parent's side of a child process that handles hostile input under limits. The child is a new program,
not a fork. Each wait has a time limit. The child's side is worker.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

from vkbackend.errors import Timeout, VkbackendError
from vkbackend.models.processes.frames import ENDED, HEAD, MAX_ERROR, READY, REFUSED
from vkbackend.system import interrupts
from vkbackend.system.child_pipes import Pipes
from vkbackend.system.confinement import OVER_CPU, Confinement
from vkbackend.system.process_tree import APART

# Like `python -m`, but our sys.path comes last, because a file next to the caller's program could shadow one
# of the worker's modules.
START = "import sys; sys.path += sys.argv[1:]; from {} import main; main()"
START_S = 60.0  # A start takes 0.2 s on two cores.
END_S = 5.0  # A killed process must end within this time.
WATCH_S = 0.25  # During a request, the child's use of the machine is read at this interval.


class Ended(Exception):
    """Raised if the process ended. `code` is its exit code as in Popen. `excess` is "cpu" or "memory" if the
    process was killed because it used too much."""

    def __init__(self, code: int | None, excess: str = "") -> None:
        self.code, self.excess = code, excess

    @property
    def over_cpu(self) -> bool:
        return self.excess == "cpu" or self.code == OVER_CPU

    def __str__(self) -> str:
        if self.excess:
            return f"it used too much {self.excess}"
        return "exit code None" if self.code is None else interrupts.name_of(self.code)


class Child:
    """A running child process. `worker` is the module whose `main` the process runs. `purpose` says in
    messages what the process is for. `memory` is the maximum number of bytes that the process may take.

    Raises VkbackendError if the process cannot be started, and Timeout if it is not ready in START_S.
    """

    def __init__(self, worker: str, purpose: str, memory: int) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable or "", "-P", "-c", START.format(worker), *filter(None, sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                **APART,  # only the caller handles Ctrl-C
            )
            self._pipes = Pipes(self._process)
            self.kill = weakref.finalize(self, _end, self._process, self._pipes, os.getpid())
            self._confinement = Confinement(self._process, memory)
        except OSError as error:
            raise VkbackendError(f"no process for {purpose} can be started: {error}") from None
        self._excess = ""
        try:
            self.exchange((), START_S, READY)
        except TimeoutError:
            raise Timeout(f"the process for {purpose} did not start in {START_S:.0f} s") from None
        except Ended as ended:
            raise VkbackendError(
                f"the process for {purpose} did not start ({ended}); `{sys.executable} -m {worker} "
                "</dev/null` shows why"
            ) from None

    def idle(self) -> bool:
        """Return whether the child is alive and has sent nothing. Otherwise kill it."""
        if self.kill.alive and self._pipes.is_quiet():  # the pipes of a killed child may look quiet
            return True
        self.kill()
        return False

    def stop(self) -> None:
        """End the process while another thread waits for it, which then raises Ended."""
        self._process.kill()

    def exchange(
        self,
        frame: tuple[bytes, ...],
        limit_s: float,
        expected: int,
        n_bytes_max: int = 0,
        cpu_s: float = START_S,
    ) -> tuple[int, int, bytearray]:
        """Send the pieces of a frame, and return the reply's kind, number and bytes. The kind is `expected`,
        or the reply is a refusal. Any failure kills the process, because a late reply would answer the next
        request. Raises TimeoutError, and Ended if the child ends or uses more than `cpu_s` seconds of CPU
        time."""
        deadline = time.monotonic() + limit_s
        self._confinement.begin()
        try:
            for piece in frame:
                left = memoryview(piece)
                while left:
                    left = left[self._watched(self._pipes.write, left, deadline, cpu_s) :]
            n_bytes, number, kind = HEAD.unpack(self._receive(HEAD.size, deadline, cpu_s))
            most = {expected: n_bytes_max, REFUSED: 4 * MAX_ERROR, ENDED: 4 * MAX_ERROR}
            if n_bytes > most.get(kind, -1):
                raise EOFError
            body = self._receive(n_bytes, deadline, cpu_s)
            if kind in (REFUSED, ENDED):
                body.decode("utf-8", "surrogatepass")
            return kind, number, body
        except TimeoutError:
            self.kill()
            raise
        except (OSError, EOFError, UnicodeDecodeError):
            raise self.ended() from None
        except BaseException:
            self.kill()
            raise

    def ended(self) -> Ended:
        """Wait for the end of the process, kill it if it does not end, and return the error to raise."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)  # Read the exit code before `kill` replaces it.
        code = self._process.returncode
        self.kill()
        return Ended(code, self._excess)

    def _receive(self, n_bytes: int, deadline: float, cpu_s: float) -> bytearray:
        data = bytearray(n_bytes)
        left = memoryview(data)
        while left:
            n = self._watched(self._pipes.read_into, left, deadline, cpu_s)
            if not n:
                raise EOFError
            left = left[n:]
        return data

    def _watched(
        self, transfer: Callable[[memoryview, float], int], data: memoryview, deadline: float, cpu_s: float
    ) -> int:
        """Return how many bytes `transfer` moves. Meanwhile, end the child if it uses too much. Raises
        TimeoutError at the deadline, and EOFError if the child was ended."""
        while (seconds := deadline - time.monotonic()) > 0:
            with suppress(TimeoutError):
                return transfer(data, min(seconds, WATCH_S))
            self._excess = self._confinement.excess(cpu_s)
            if self._excess:
                self._process.kill()
                raise EOFError
        raise TimeoutError


def _end(process: subprocess.Popen[bytes], pipes: Pipes, pid: int) -> None:
    """Kill the process. In a forked child, only close the pipes."""
    pipes.close()
    if pid != os.getpid():
        process.returncode = 0  # Only the parent may wait for the process.
        return
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
