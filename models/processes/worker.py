"""The child's side of child.py: limits of memory and processor time, and frames on a socket, which is stdin.

Few imports make the start fast and leave most of the memory limit to the work.
"""

from __future__ import annotations

import math
import os
import resource
import signal
from collections.abc import Callable

from vkbackend.models.processes.frames import HEAD

READ_S = 60  # CPU seconds to send a reply and read the next request.
SOCKET = 0


class Refused(Exception):
    """An error to report to the parent. The process continues."""


def run(serve: Callable[[], None], memory: int) -> None:
    """Call `serve` with at most `memory` bytes of address space. End when the parent closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The caller handles Ctrl-C.
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # The parent's blocked signals are inherited.
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_AS, memory)
    try:
        serve()
    except OSError:  # The other side closed the socket.
        os._exit(0)


def limit(resource_id: int, most: int) -> None:
    """Set a limit, unless the system's limit is lower."""
    hard = resource.getrlimit(resource_id)[1]
    resource.setrlimit(resource_id, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def limit_cpu(seconds: float) -> None:
    """Limit CPU time from now on. At the limit SIGXCPU ends the process, even inside a long call."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds))


def receive(n_bytes: int) -> bytearray:
    """End the process if the other side closed the socket."""
    data = bytearray()
    while len(data) < n_bytes:
        piece = os.read(SOCKET, n_bytes - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data


def send(kind: int, body: bytes, number: int = 0) -> None:
    limit_cpu(READ_S)
    for piece in (HEAD.pack(len(body), number, kind), body):
        left = memoryview(piece)
        while left:
            left = left[os.write(SOCKET, left) :]


def send_text(kind: int, text: str, number: int = 0) -> None:
    send(kind, text.encode("utf-8", "surrogatepass"), number)


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]
