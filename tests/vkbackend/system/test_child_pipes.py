"""Both kinds of pipes transfer the same bytes to and from a child, end with the child, and wait for a limited
time."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vkbackend.system.child_pipes import Pipes, ThreadedPipes

pytestmark = pytest.mark.no_vulkan
ECHO = "import os\nwhile data := os.read(0, 1 << 20): os.write(1, data)"
SECONDS = 30.0


@pytest.fixture(params=[Pipes, ThreadedPipes])
def started(request: pytest.FixtureRequest) -> Iterator[Callable[[str], tuple[Any, Any]]]:
    processes: list[Any] = []

    def start(code: str) -> tuple[Any, Any]:
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        processes.append((process, request.param(process)))
        return processes[-1]

    yield start
    for process, pipes in processes:
        pipes.close()
        process.kill()
        process.wait()


def test_bytes_return_in_order_through_full_pipes(started: Callable[[str], tuple[Any, Any]]) -> None:
    _, pipes = started(ECHO)
    sent, received = memoryview(bytes(range(251)) * 4000), bytearray()
    left, buffer = sent, bytearray(100_000)
    while len(received) < len(sent):
        for _ in range(3):  # the test writes faster than it reads the child's output
            try:
                left = left[pipes.write(left, 0.01) :] if left else left
            except TimeoutError:
                break
        n = pipes.read_into(memoryview(buffer), SECONDS)
        assert n
        received += buffer[:n]
    assert received == sent and pipes.is_quiet()


def test_waits_end_in_time(started: Callable[[str], tuple[Any, Any]]) -> None:
    _, pipes = started("import time; time.sleep(60)")
    with pytest.raises(TimeoutError):
        pipes.read_into(memoryview(bytearray(1)), 0.01)
    with pytest.raises(TimeoutError):
        for _ in range(100):  # more bytes than a pipe's buffer holds
            pipes.write(memoryview(bytes(1 << 16)), 0.01)


def test_the_end_of_the_child_is_the_end_of_the_pipes(started: Callable[[str], tuple[Any, Any]]) -> None:
    process, pipes = started("")
    assert pipes.read_into(memoryview(bytearray(1)), SECONDS) == 0 and not pipes.is_quiet()
    process.wait()
    deadline = time.monotonic() + SECONDS
    with pytest.raises(BrokenPipeError):
        while time.monotonic() < deadline:
            pipes.write(memoryview(b"x"), 1.0)


def test_a_program_that_does_not_ignore_sigpipe_survives_the_end_of_its_child() -> None:
    program = f"""
        import signal, subprocess, sys
        from vkbackend.system.child_pipes import Pipes
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        process = subprocess.Popen([sys.executable, "-c", ""], stdin=-1, stdout=-1, bufsize=0)
        process.wait()
        try:
            Pipes(process).write(memoryview(b"x"), {SECONDS})
        except BrokenPipeError:
            print("alive", signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.sigpending())
        """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive set() set()\n", "")
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN
