"""Test servers with a full disk, without free descriptors or memory, with a stopped engine, or with a jumping
clock. Answers remain right, errors are typed, and the server recovers."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from random_requests import tree_of
from serving import HANG_S, Address, Command, FakeModel, served, until

pytestmark = pytest.mark.no_vulkan

WORDS = "Once upon a time there was a cat and a dog who went to the park and saw a big tree near the river"
BODY: dict[str, Any] = {"prompt": WORDS, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}


def text_of(address: Address, body: dict[str, Any] = BODY) -> str:
    status, answer, _ = address.post("/v1/completions", body)
    assert status == 200, answer
    text: str = answer["choices"][0]["text"]
    return text


@pytest.fixture(scope="module")
def expected() -> str:
    command = Command("-c", "256")
    text = text_of(command.address)
    assert command.end() == 0
    return text


def ended(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}/exe").exists() for pid in pids)  # a zombie has no exe


def streamed(address: Address, texts: list[str]) -> threading.Thread:
    def read() -> None:
        events = address.events("/v1/completions", BODY | {"stream": True, "max_tokens": 200})
        texts.append("".join(e["choices"][0]["text"] if "choices" in e else str(e) for e in events[:-1]))

    thread = threading.Thread(target=read)
    thread.start()
    return thread


# ---- the disk is full ----


@pytest.mark.wide
@pytest.mark.parametrize("most", [200, 9000])
def test_a_full_disk(tmp_path: Path, expected: str, most: int) -> None:
    """No file may have more than `most` bytes. This affects blocks, saved states, and the log."""
    command = Command(
        "-c", "256", "-np", "2", "--cache-disk", str(tmp_path / "kv"), "--slot-save-path",
        str(tmp_path / "slots"),
        "--log-file", str(tmp_path / "log.txt"), limits={resource.RLIMIT_FSIZE: most},
    )  # fmt: skip
    for _ in range(3):
        assert text_of(command.address) == expected
        status, answer, _ = command.address.post("/slots/0?action=save", {"filename": "a"})
        assert 400 <= status < 600 and "cannot be written" in answer["error"]["message"], answer
    assert command.address.get("/health")[0] == 200
    engine = command.engine()
    assert command.end() == 0 and ended([engine])
    assert sum("are not written" in line for line in command.log) <= 1
    assert not any("Traceback" in line or "bug of this server" in line for line in command.log), command.log
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "log.txt"]
    assert all(path.stat().st_size <= most for path in left)
    assert not [path for path in left if path.name.startswith(".")], "a temporary file is left"


# ---- file descriptors ----


def descriptors(command: Command) -> int:
    return len(os.listdir(f"/proc/{command.process.pid}/fd"))


@pytest.mark.wide
@pytest.mark.timeout(600)
def test_more_clients_than_file_descriptors(expected: str) -> None:
    """The server refuses connections before descriptors run out. When the clients leave, the server answers
    as before, also with a new engine."""
    command = Command("-c", "256", limits={resource.RLIMIT_NOFILE: 64})
    text_of(command.address)
    before = descriptors(command)
    for _ in range(3):
        clients = [socket.create_connection(("127.0.0.1", command.address.port), HANG_S) for _ in range(200)]
        refused = [client for client in clients if is_refused(client)]
        assert 150 <= len(refused) < 200 and descriptors(command) < 64
        for client in clients:
            client.close()
        until(lambda: descriptors(command) <= before + 2)
        assert text_of(command.address) == expected
        assert command.address.post("/v1/chat/completions", CHAT)[0] == 200
        os.kill(command.engine(), signal.SIGKILL)
        until(lambda: command.address.post("/v1/completions", BODY)[0] == 200)  # 503 while it is reopened
        assert text_of(command.address) == expected
    assert command.end() == 0
    assert sum("at most" in line and "ulimit -n" in line for line in command.log) == 1, command.log
    assert not any("Traceback" in line or "used up" in line for line in command.log), command.log


def is_refused(client: socket.socket) -> bool:
    client.settimeout(0.3)
    with suppress(TimeoutError):
        return client.recv(100).startswith(b"HTTP/1.1 503")
    return False


@pytest.mark.wide
def test_file_descriptors_run_out(expected: str) -> None:
    """Other files use all of the server's descriptors. New clients wait, and the log gets one line."""
    command = Command("-c", "256")
    text_of(command.address)
    soft, hard = resource.prlimit(command.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(command.process.pid, resource.RLIMIT_NOFILE, (8, hard))
    texts: list[str] = []
    clients = [threading.Thread(target=lambda: texts.append(text_of(command.address))) for _ in range(20)]
    for client in clients:
        client.start()
    time.sleep(3)
    assert not texts
    resource.prlimit(command.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
    for client in clients:
        client.join(HANG_S)
    assert texts == [expected] * 20
    assert command.end() == 0
    assert sum("used up" in line for line in command.log) == 1, command.log
    assert not any("Traceback" in line for line in command.log), command.log


# ---- memory ----


@pytest.mark.wide
@pytest.mark.parametrize("mib", [1, 8, 32])
def test_memory_runs_out(expected: str, mib: int) -> None:
    """The engine's process may allocate a few MiB more. Afterwards every answer is right or an error.
    After the limit is lifted the server answers again, if necessary with a new engine."""
    command = Command("-c", "512", "-np", "4", "-ub", "256")
    address, rng = command.address, random.Random(mib)
    engine = command.engine()
    pages = int(Path(f"/proc/{engine}/statm").read_text(encoding="utf-8").split()[0])
    hard = resource.prlimit(engine, resource.RLIMIT_AS)[1]
    resource.prlimit(engine, resource.RLIMIT_AS, (pages * resource.getpagesize() + (mib << 20), hard))
    for _ in range(10):
        long = {
            "prompt": " ".join(rng.choices(WORDS.split(), k=300)),
            "max_tokens": 4,
            "json_schema": {"type": "object"},
        }
        status, answer, _ = address.post("/v1/completions", long)
        assert status == 200 or answer["error"]["message"], answer
        status, answer, _ = address.post("/v1/completions", BODY)
        assert (answer["choices"][0]["text"] == expected) if status == 200 else answer["error"]["message"]
    with suppress(ProcessLookupError):
        resource.prlimit(engine, resource.RLIMIT_AS, (hard, hard))
    until(lambda: address.get("/health")[0] == 200)
    assert text_of(address) == expected
    assert command.end() == 0
    assert not [line for line in command.log if "bug of this server" in line], command.log


# ---- a process that stops, or is killed ----


@pytest.mark.wide
def test_an_engine_that_stops_for_a_while() -> None:
    command = Command("-c", "256")
    whole: list[str] = []
    streamed(command.address, whole).join()
    texts: list[str] = []
    engine, thread = command.engine(), streamed(command.address, texts)
    time.sleep(0.3)
    os.kill(engine, signal.SIGSTOP)
    assert command.address.get("/health")[0] == 200  # the server itself answers
    time.sleep(3)
    os.kill(engine, signal.SIGCONT)
    thread.join(HANG_S)
    assert texts == whole and command.engine() == engine
    assert command.end() == 0


@pytest.mark.wide
def test_an_engine_that_stops_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time limit the engine is killed and the model is opened again. The stream continues there."""
    monkeypatch.setenv("VKBACKEND_TIMEOUT", "1")
    command = Command("-c", "256")
    whole: list[str] = []
    streamed(command.address, whole).join()
    texts: list[str] = []
    engine, thread = command.engine(), streamed(command.address, texts)
    time.sleep(0.3)
    os.kill(engine, signal.SIGSTOP)
    thread.join(2 * HANG_S)
    assert texts == whole and ended([engine])
    assert any("said nothing" in line or "the model is lost" in line for line in command.log), command.log
    assert command.engine() != engine and text_of(command.address)
    assert command.end() == 0


@pytest.mark.wide
@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_server_leaves_no_process(stopped: bool) -> None:
    """The engine and the process of the chat template end, even in the middle of an answer."""
    command = Command("-c", "256")
    assert command.address.post("/v1/chat/completions", CHAT)[0] == 200
    sock = command.address.send("/v1/completions", BODY | {"max_tokens": 200, "stream": True})
    assert sock.recv(100)
    pids = tree_of(command.process.pid)
    assert len(pids) >= 3, "server, engine, template"
    if stopped:
        os.kill(command.process.pid, signal.SIGSTOP)
        time.sleep(0.5)
    command.process.kill()
    command.process.wait(HANG_S)
    until(lambda: ended(pids[1:]))
    sock.close()


# ---- the clock jumps ----


@pytest.fixture
def jumping_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each time that the wall clock is read, its value is years away from the previous value."""
    rng = random.Random(1)
    monkeypatch.setattr(time, "time", lambda: rng.choice((0.0, 1e9, 4e9, 1e10)))
    monkeypatch.setattr(time, "time_ns", lambda: int(rng.choice((0, 10**18, 4 * 10**18))))
    yield


@pytest.mark.usefixtures("jumping_clock")
def test_the_clock_jumps() -> None:
    """Time limits use the monotonic clock."""
    with served(FakeModel(pause_s=0.01)) as address:
        for _ in range(3):
            assert text_of(address, {"prompt": "a", "max_tokens": 9}) == "x" * 9
        events = address.events("/v1/completions", {"prompt": "a", "max_tokens": 9, "stream": True})
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "x" * 9
