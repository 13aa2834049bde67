"""Simulates a slow link between two nodes, with tap devices in their namespaces and a thread that delays
packets."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from namespaces import run

_TUNSETIFF, _TAP, _NO_INFO = 0x400454CA, 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
NET = "10.213.78"


def _tap(namespace: str, address: str) -> int:
    result: list[int | OSError] = []

    def enter() -> None:  # a thread calls this, because setns changes only its own thread's network namespace
        try:
            with open(f"/run/netns/{namespace}", encoding="utf-8") as there:
                if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", b"slow0", _TAP | _NO_INFO))
            result.append(fd)
        except OSError as error:
            result.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if isinstance(result[0], OSError):
        raise result[0]
    run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "slow0")
    run("ip", "-n", namespace, "link", "set", "slow0", "up")
    return result[0]


@contextmanager
def slow_link(names: list[str], delay_s: float) -> Iterator[list[str]]:
    """Yield the addresses of two nodes on a slow link. Raise OSError if this machine cannot make tap
    devices."""
    addresses = [f"{NET}.{n + 1}" for n in range(2)]
    ends = [_tap(name, address) for name, address in zip(names, addresses, strict=True)]
    ended = threading.Event()

    def carry() -> None:
        late: deque[tuple[float, int, bytes]] = deque()
        while not ended.is_set():
            wait = max(0.0, late[0][0] - time.monotonic()) if late else 0.1
            for fd in select.select(ends, [], [], wait)[0]:
                with suppress(OSError):
                    other = ends[1 - ends.index(fd)]
                    late.append((time.monotonic() + delay_s, other, os.read(fd, 1 << 16)))
            while late and late[0][0] <= time.monotonic():
                with suppress(OSError):
                    os.write(late[0][1], late[0][2])
                late.popleft()

    thread = threading.Thread(target=carry, daemon=True)
    thread.start()
    try:
        yield addresses
    finally:
        ended.set()
        thread.join()
        for fd in ends:
            os.close(fd)


def can_slow() -> bool:
    return Path("/dev/net/tun").exists() and os.access("/dev/net/tun", os.R_OK | os.W_OK)
