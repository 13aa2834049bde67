"""The parent's ends of a child's stdin and stdout pipes. Every wait has a time limit.

Windows cannot wait for a pipe with a time limit, so threads read and write there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

PIECE = 1 << 16  # Bytes that a pipe takes at once.


class ThreadedPipes:
    """Pipes with a thread that reads and a thread that writes."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._change = threading.Condition()
        self._arrived: deque[bytes] = deque()
        self._unsent: SimpleQueue[memoryview | None] = SimpleQueue()
        self._waiting = 0  # Bytes that the writer has not sent.
        self._ended = self._broken = False
        for run in (self._read, self._write):
            threading.Thread(target=run, daemon=True, name="vkbackend-pipe").start()

    def write(self, data: memoryview, seconds: float) -> int:
        """Send bytes and return how many the pipe took. Raises TimeoutError, BrokenPipeError."""
        piece = data[:PIECE]
        with self._change:
            if not self._change.wait_for(lambda: not self._waiting or self._broken, seconds):
                raise TimeoutError
            if self._broken:
                raise BrokenPipeError
            self._waiting = len(piece)
        self._unsent.put(memoryview(bytes(piece)))
        return len(piece)

    def read_into(self, target: memoryview, seconds: float) -> int:
        """Return how many bytes arrived, 0 at the end. Raises TimeoutError."""
        with self._change:
            if not self._change.wait_for(lambda: self._arrived or self._ended, seconds):
                raise TimeoutError
            if not self._arrived:
                return 0
            piece = self._arrived.popleft()
            n = min(len(piece), len(target))
            target[:n] = piece[:n]
            if n < len(piece):
                self._arrived.appendleft(piece[n:])
            return n

    def is_quiet(self) -> bool:
        """Return whether the child is connected and has sent nothing."""
        with self._change:
            return not self._ended and not self._arrived

    def close(self) -> None:
        """Close the child's stdin after all pending bytes are sent. The threads end with the child."""
        self._unsent.put(None)

    def _read(self) -> None:
        piece = b" "
        while piece:
            try:
                piece = os.read(self._stdout.fileno(), PIECE)
            except (OSError, ValueError):
                piece = b""
            with self._change:
                if piece:
                    self._arrived.append(piece)
                self._ended = not piece
                self._change.notify_all()
        with suppress(OSError):
            self._stdout.close()

    def _write(self) -> None:
        try:
            while (left := self._unsent.get()) is not None:
                while left:
                    left = left[os.write(self._stdin.fileno(), left) :]
                with self._change:
                    self._waiting = 0
                    self._change.notify_all()
        except (OSError, ValueError):
            with self._change:
                self._broken = True
                self._change.notify_all()
        with suppress(OSError):
            self._stdin.close()


if sys.platform == "win32":
    Pipes = ThreadedPipes
else:
    import fcntl
    import select

    LARGE_PIPE = 1 << 20  # bytes; with pipes of 64 KiB, a reply of 1 MB takes a sixth more CPU time

    class Pipes:
        """Pipes that the calling thread polls."""

        def __init__(self, process: subprocess.Popen[Any]) -> None:
            assert process.stdin is not None and process.stdout is not None
            self._stdin, self._stdout = process.stdin, process.stdout
            for pipe in (self._stdin, self._stdout):
                os.set_blocking(pipe.fileno(), False)
                if sys.platform == "linux":
                    with suppress(OSError):  # The memory of a user's pipes is limited.
                        fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, LARGE_PIPE)
            self._readable, self._writable = select.poll(), select.poll()
            self._readable.register(self._stdout, select.POLLIN)
            self._writable.register(self._stdin, select.POLLOUT)

        def write(self, data: memoryview, seconds: float) -> int:
            """Send bytes and return how many the pipe took. Raises TimeoutError, BrokenPipeError."""
            try:
                return _write_quietly(self._stdin.fileno(), data)
            except BlockingIOError:
                if not self._writable.poll(1000 * seconds):
                    raise TimeoutError from None
                return 0

        def read_into(self, target: memoryview, seconds: float) -> int:
            """Return how many bytes arrived, 0 at the end. Raises TimeoutError."""
            if not self._readable.poll(1000 * seconds):
                raise TimeoutError
            return os.readv(self._stdout.fileno(), [target])

        def is_quiet(self) -> bool:
            """Return whether the child is connected and has sent nothing."""
            return not self._readable.poll(0)

        def close(self) -> None:
            for pipe in (self._stdin, self._stdout):
                with suppress(OSError):
                    pipe.close()

    def _write_quietly(descriptor: int, data: memoryview) -> int:
        """Write without SIGPIPE, which would end programs that do not ignore it."""
        if signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN:
            return os.write(descriptor, data)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        try:
            return os.write(descriptor, data)
        except BrokenPipeError:
            if sys.platform != "darwin":
                signal.sigtimedwait({signal.SIGPIPE}, 0)  # take the pending signal
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
