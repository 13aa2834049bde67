from __future__ import annotations

import os
import pickle
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vkbackend import env
from vkbackend.errors import DeviceLost, VkbackendError
from vkbackend.vulkan.instance import VALIDATION_LAYER

WORKER = Path(__file__).with_name("worker.py")
ANSWER_S = 5.0  # seconds that answers may take in addition to VKBACKEND_TIMEOUT, and that closing may take


class Process:
    """A worker process, which answers requests in order. After the process has ended, methods raise
    DeviceLost."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._socket, theirs = socket.socketpair()
        self._conn = Connection(os.dup(self._socket.fileno()))
        self._sent = self._taken = 0
        self._forgotten: set[int] = set()  # requests whose answers are not needed
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        environment = dict(os.environ)
        if env.validation():  # kp enables no layers
            environment["VK_INSTANCE_LAYERS"] = VALIDATION_LAYER
            environment["VK_LAYER_ENABLES"] = "VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT"
        with theirs:
            # -P prevents imports from the script's folder. Drivers and layers print to stderr.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=environment,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, request: tuple[Any, ...], fd: int | None = None) -> int:
        """Send a request with an optional file descriptor, and return the request's number."""
        self._sent += 1
        try:
            self._conn.send_bytes(pickle.dumps(request))
            if fd is not None:
                socket.send_fds(self._socket, [b"+"], [fd])
        except OSError:
            raise self._death() from None
        except BaseException:  # after an incomplete message, the worker would misread the next message
            self.kill()
            raise
        return self._sent

    def forget(self, number: int) -> None:
        if number > self._taken:
            self._forgotten.add(number)

    def answers(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            if self._taken + 1 not in self._forgotten:
                return True
            self._receive()
        return False

    def _receive(self) -> tuple[str, Any]:
        try:
            received = pickle.loads(self._conn.recv_bytes())
        except (EOFError, OSError):
            raise self._death() from None
        except BaseException:  # as in `send`
            self.kill()
            raise
        self._taken += 1
        return received

    def answer(self) -> Any:
        kind, value = self._receive()
        if kind == "error":
            raise VkbackendError(f"{self._name}: kp: {value}")
        return value

    def _death(self) -> DeviceLost:
        self.kill()
        return DeviceLost(
            f"{self._name}: the process that drives the device with kp has ended (exit code "
            f"{self._process.returncode}), its last words are on stderr; close the model and load it again"
        )

    def kill(self) -> None:
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # the process may hang in a kernel call
            self._process.wait(ANSWER_S)

    def close(self) -> None:
        """Ask the process to free its objects and end, and kill it if it does not end."""
        if self._conn.closed:
            return
        try:
            if self._process.poll() is None:
                self.send(("close",))
            self._process.wait(ANSWER_S)
        except (DeviceLost, subprocess.TimeoutExpired):
            self.kill()
        self._conn.close()
        self._socket.close()
