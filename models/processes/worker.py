"""The child's side of child.py: limits of memory and processor time, and frames on stdin and stdout.

The module imports little, so that it starts fast and leaves most of the memory limit for the work.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from vkbackend.models.processes.frames import HEAD
from vkbackend.system import interrupts
from vkbackend.system.own_limits import limit_cpu as limit_cpu
from vkbackend.system.own_limits import restrict

READ_S = 60  # CPU seconds to send a reply and read the next request.
STDIN, STDOUT = 0, 1
PIECE = 1 << 20  # bytes


class Refused(Exception):
    """An error to report to the parent. The process continues."""


def run(serve: Callable[[], None], memory: int) -> None:
    """Call `serve` with at most `memory` bytes of address space. End when the parent closes the pipe."""
    interrupts.ignore()  # The caller handles Ctrl-C.
    restrict(memory)
    try:
        serve()
    except OSError:  # The other side closed the pipe.
        os._exit(0)


def receive(n_bytes: int) -> bytearray:
    """End the process if the other side closed the pipe."""
    data = bytearray()
    while len(data) < n_bytes:
        piece = os.read(STDIN, min(n_bytes - len(data), PIECE))
        if not piece:
            os._exit(0)
        data += piece
    return data


def send(kind: int, body: bytes, number: int = 0) -> None:
    limit_cpu(READ_S)
    for piece in (HEAD.pack(len(body), number, kind), body):
        left = memoryview(piece)
        while left:
            left = left[os.write(STDOUT, left[:PIECE]) :]


def send_text(kind: int, text: str, number: int = 0) -> None:
    send(kind, text.encode("utf-8", "surrogatepass"), number)


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]
