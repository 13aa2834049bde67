"""Runs a chat template in a separate process (template_worker.py), because a template of 119 characters can
crash the Python interpreter. The process is a new program, not a fork. If the process ends, another is
started. Each wait has a time limit.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from vkbackend.errors import InvalidArgument, Timeout, VkbackendError
from vkbackend.models.text.template_frames import ASKED, ENDED, HEAD, MAX_ERROR, READY, REFUSED, TEXT

WORKER = "vkbackend.models.text.template_worker"
# Like `python -m`, but our sys.path comes last, because a file next to the caller's program could shadow one
# of the worker's modules.
START = f"import sys; sys.path += sys.argv[1:]; from {WORKER} import main; main()"
MAX_REQUEST = 1 << 25  # Bytes; twice the longest text that a tokenizer accepts.
CPU_S, WALL_S = 5, 30.0  # Per request. The longest published templates compile in 0.1 s.
START_S = 60.0  # A start takes 0.2 s on two cores.
END_S = 5.0  # A killed process must end within this time.
ANOTHER = "give another one with --chat-template-file (in Python `template`)"

Items = tuple[tuple[str, Any], ...]


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


class TemplateProcess:
    """A compiled template. Threads may share it, but render one at a time. The errors are ChatTemplate's."""

    def __init__(self, source: str, bos: str, eos: str, most: int) -> None:
        self._template = {"source": source, "bos": bos, "eos": eos, "most": most}
        self._renew()
        self._ask(None)

    def _renew(self) -> None:
        self._worker: _Worker | None = None
        self._lock, self._pid = threading.RLock(), os.getpid()

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> str:
        return self._ask([tuple(message.items()) for message in messages], dict(variables))

    def _ask(self, messages: list[Items] | None, variables: dict[str, Any] | None = None) -> str:
        """Render `messages`. If None, only make sure that a worker runs and has compiled the template."""
        if self._pid != os.getpid():  # After a fork, the worker and the lock belong to the parent.
            self._renew()
        lock = self._lock
        try:
            if not lock.acquire(timeout=WALL_S):
                raise Timeout(f"the chat template was busy with other requests for {WALL_S:.0f} s; try again")
            # The attribute is None during a request, so an interrupt drops the worker and its pending reply.
            worker, self._worker = self._worker, None
            if worker is None or not worker.idle():
                worker = _Worker()
                worker.ask(self._template, 0)
            try:
                text = "" if messages is None else worker.render(messages, variables or {})
            except InvalidArgument:
                self._worker = worker
                raise
            self._worker = worker
            return text
        finally:
            try:
                lock.release()
            except RuntimeError:
                pass  # The lock is not acquired.


class _Worker:
    def __init__(self) -> None:
        self._last: tuple[list[Items], str] = [], ""
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable or "", "-P", "-c", START, *(path for path in sys.path if path)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # only the caller handles Ctrl-C
                )
        except OSError as error:
            self._socket.close()
            raise VkbackendError(f"no process for the chat template can be started: {error}") from None
        self.kill = weakref.finalize(self, _end, self._process, self._socket, os.getpid())
        try:
            self._exchange(b"", START_S, READY)
        except TimeoutError:
            raise Timeout(f"the process for the chat template did not start in {START_S:.0f} s") from None
        except Ended as ended:
            raise VkbackendError(
                f"the process for the chat template did not start ({ended}); `{sys.executable} -m {WORKER} "
                "</dev/null` shows why"
            ) from None

    def idle(self) -> bool:
        """Return whether the worker is alive and has sent nothing. Otherwise kill the worker."""
        try:
            self._socket.setblocking(False)
            self._socket.recv(1)
        except BlockingIOError:
            return True
        except OSError:
            pass
        self.kill()
        return False

    def render(self, messages: list[Items], variables: dict[str, Any]) -> str:
        before, text = self._last
        self._last = [], ""
        n = sum(1 for _ in takewhile(_same, zip(messages, before, strict=False)))
        kept, rest = self.ask({"messages": messages[n:], "variables": variables, "held": len(text)}, n)
        self._last = messages, text[:kept] + rest
        return self._last[1]

    def ask(self, request: dict[str, Any], kept: int) -> tuple[int, str]:
        """Send a request, whose messages follow the first `kept` messages of the last request. Return how
        many characters of the last rendered text are unchanged, and the text after these."""
        try:
            text = json.dumps(request | {"cpu_s": CPU_S}, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"a conversation of texts is expected: {error}") from None
        body = text.encode("utf-8", "surrogatepass")
        if len(body) > MAX_REQUEST:
            raise InvalidArgument(f"the conversation has {len(body)} bytes, at most {MAX_REQUEST} are taken")
        try:
            kind, kept, text = self._exchange(HEAD.pack(len(body), kept, ASKED) + body, WALL_S, TEXT)
        except TimeoutError:
            raise InvalidArgument(f"the chat template took more than {WALL_S:.0f} s; {ANOTHER}") from None
        except Ended as ended:
            if ended.code == -signal.SIGXCPU:
                raise InvalidArgument(f"the chat template computed for {CPU_S} s; {ANOTHER}") from None
            raise InvalidArgument(
                f"the chat template ended the process that ran it ({ended}); {ANOTHER}"
            ) from None
        if kind == ENDED:
            self.kill()
        if kind != TEXT:
            raise InvalidArgument(text)
        return kept, text

    def _exchange(self, frame: bytes, limit_s: float, expected: int) -> tuple[int, int, str]:
        """Send a frame and return the reply, which has the `expected` kind or is a refusal. Any failure kills
        the process, because a late reply would answer the next request."""
        deadline = time.monotonic() + limit_s
        try:
            self._socket.settimeout(limit_s)
            self._socket.sendall(frame, socket.MSG_NOSIGNAL)
            n_bytes, kept, kind = HEAD.unpack(self._receive(HEAD.size, deadline))
            most = {expected: MAX_REQUEST, REFUSED: 4 * MAX_ERROR, ENDED: 4 * MAX_ERROR}
            if n_bytes > most.get(kind, -1):
                raise EOFError
            return kind, kept, self._receive(n_bytes, deadline).decode("utf-8", "surrogatepass")
        except TimeoutError:
            self.kill()
            raise
        except (OSError, EOFError, UnicodeDecodeError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)  # Read the exit code before `kill` replaces it.
            code = self._process.returncode
            self.kill()
            raise Ended(code) from None
        except BaseException:
            self.kill()
            raise

    def _receive(self, n_bytes: int, deadline: float) -> bytearray:
        data = bytearray(n_bytes)
        left = memoryview(data)
        while left:
            if (seconds := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self._socket.settimeout(seconds)
            n = self._socket.recv_into(left)
            if not n:
                raise EOFError
            left = left[n:]
        return data


def _same(pair: tuple[Items, Items]) -> bool:
    """Return whether two messages are equal and contain only texts. Other values may change in place,
    unnoticed."""
    return pair[0] == pair[1] and all(isinstance(value, str) for _, value in pair[0])


def _end(process: subprocess.Popen[bytes], ours: socket.socket, pid: int) -> None:
    """Kill the process. In a forked child, only close the socket."""
    ours.close()
    if pid != os.getpid():
        process.returncode = 0  # Only the parent may wait for the process.
        return
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
