"""The parent's side of a child process that handles hostile input under limits. The child is a new program,
not a fork. Each wait has a time limit. worker.py is the child's side.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from contextlib import suppress

from vkbackend.errors import Timeout, VkbackendError
from vkbackend.models.processes.frames import ENDED, HEAD, MAX_ERROR, READY, REFUSED

# Like `python -m`, but our sys.path comes last, because a file next to the caller's program could shadow one
# of the worker's modules.
START = "import sys; sys.path += sys.argv[1:]; from {} import main; main()"
START_S = 60.0  # A start takes 0.2 s on two cores.
END_S = 5.0  # A killed process must end within this time.


class Ended(Exception):
    """Raised if the process ended; `code` is its exit code as in Popen."""

    def __init__(self, code: int | None) -> None:
        self.code = code

    def __str__(self) -> str:
        if self.code is None or self.code >= 0:
            return f"exit code {self.code}"
        with suppress(ValueError):
            return signal.Signals(-self.code).name
        return f"signal {-self.code}"


class Child:
    """A running child process. `worker` is the module whose `main` it runs, `purpose` words for messages.

    Raises VkbackendError if the process cannot be started, and Timeout if it is not ready in START_S.
    """

    def __init__(self, worker: str, purpose: str) -> None:
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable or "", "-P", "-c", START.format(worker), *filter(None, sys.path)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # only the caller handles Ctrl-C
                )
        except OSError as error:
            self._socket.close()
            raise VkbackendError(f"no process for {purpose} can be started: {error}") from None
        self.kill = weakref.finalize(self, _end, self._process, self._socket, os.getpid())
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
        try:
            self._socket.setblocking(False)
            self._socket.recv(1)
        except BlockingIOError:
            return True
        except OSError:
            pass
        self.kill()
        return False

    def exchange(
        self, frame: tuple[bytes, ...], limit_s: float, expected: int, n_bytes_max: int = 0
    ) -> tuple[int, int, bytearray]:
        """Send the pieces of a frame and return kind, number and bytes of the reply, which has the `expected`
        kind or is a refusal. Any failure kills the process, because a late reply would answer the next
        request. Raises TimeoutError and Ended."""
        deadline = time.monotonic() + limit_s
        try:
            for piece in frame:
                self._socket.settimeout(_left(deadline))
                self._socket.sendall(piece, socket.MSG_NOSIGNAL)
            n_bytes, number, kind = HEAD.unpack(self._receive(HEAD.size, deadline))
            most = {expected: n_bytes_max, REFUSED: 4 * MAX_ERROR, ENDED: 4 * MAX_ERROR}
            if n_bytes > most.get(kind, -1):
                raise EOFError
            body = self._receive(n_bytes, deadline)
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
        return Ended(code)

    def _receive(self, n_bytes: int, deadline: float) -> bytearray:
        data = bytearray(n_bytes)
        left = memoryview(data)
        while left:
            self._socket.settimeout(_left(deadline))
            n = self._socket.recv_into(left)
            if not n:
                raise EOFError
            left = left[n:]
        return data


def _left(deadline: float) -> float:
    if (seconds := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return seconds


def _end(process: subprocess.Popen[bytes], ours: socket.socket, pid: int) -> None:
    """Kill the process. In a forked child, only close the socket."""
    ours.close()
    if pid != os.getpid():
        process.returncode = 0  # Only the parent may wait for the process.
        return
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
