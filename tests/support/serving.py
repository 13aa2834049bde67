"""Runs the real server in a thread, with a model that has no engine."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

from vkbackend.errors import InvalidArgument
from vkbackend.models.embeddings.heads import Heads
from vkbackend.models.engine.completion import Chunk
from vkbackend.models.generate_options import GenerateOptions
from vkbackend.tools import serve
from vkbackend.tools.cli import parse
from vkbackend.tools.server.front import Config, Front
from vkbackend.tools.server.model import Model
from vkbackend.tools.server.run import Server
from vkbackend.tools.server.service import Service
from vkbackend.tools.server.sockets import listen

HANG_S = 30.0


class ByteTokenizer:
    bos_id, eos_id, stop_ids = None, 0, frozenset({0})

    def decode(self, tokens: Any, skip_special: bool = True, at_start: bool = True) -> str:
        return bytes(t % 256 for t in tokens).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        return bytes([token % 256])


@dataclass
class FakeModel:
    """A model that continues every prompt with "x", one token every `pause_s` seconds. `active` counts
    the running generations."""

    pause_s: float = 0.0
    n_ctx: int = 512
    n_slots: int = 2
    n_vocab: int = 256
    n_keep: int = 0
    speculation: tuple[str, ...] = ()
    letter: str = "x"
    active: int = 0
    begun: int = 0
    fails: Callable[[int], Exception | None] = lambda n: None  # after n tokens
    lost: Exception | None = None
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    chat_template: str | None = None
    chat_templates: dict[str, str] = field(default_factory=dict)
    device_names: tuple[str, ...] = ("fake",)
    adapters: tuple[dict[str, Any], ...] = ()
    heads: Heads = field(default_factory=lambda: Heads(None, (), None, None, 8))
    is_encoder: bool = False
    pictures: Any = None

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def detokenize(self, tokens: Any, skip_special: bool = True) -> str:
        return bytes(t % 256 for t in tokens).decode("utf-8", "replace")

    @property
    def is_open(self) -> bool:
        return self.lost is None

    def stats(self) -> dict[str, Any]:
        if self.lost:
            raise self.lost
        return {"n_waiting": 0, "n_running": self.active, "n_steps": 1, "hit_rate": 0.0}

    def memory(self) -> list[dict[str, Any]]:
        return [{"device": "fake", "weights": 1}]

    def set_adapters(self, scales: list[tuple[int, float]]) -> None:
        by_id = dict(scales)
        self.adapters = tuple(row | {"scale": by_id.get(row["id"], 0.0)} for row in self.adapters)

    def close(self) -> None:
        pass

    def generation(self, ids: list[int], max_tokens: int | None, **options: Any) -> Any:
        return ids, max_tokens

    def aresume(self, generation: Any, tokens: list[int]) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of `tokens` again, as a model's engine does, and continue."""
        return self._stream(*generation)

    def astream(self, ids: list[int], max_tokens: int | None, **options: Any) -> AsyncGenerator[Chunk, None]:
        GenerateOptions.of(**options)
        if not ids:
            raise InvalidArgument("the prompt has no tokens; give at least one")
        return self._stream(ids, max_tokens)

    async def _stream(self, ids: list[int], max_tokens: int | None) -> AsyncGenerator[Chunk, None]:
        self.active += 1
        self.begun += 1
        most = self.n_ctx - len(ids) if max_tokens is None else max_tokens
        timings = {"prompt_n": float(len(ids)), "prompt_ms": 1.0, "decode_n": float(most), "decode_ms": 1.0}
        try:
            for i in range(most):
                await asyncio.sleep(self.pause_s)
                if (error := self.fails(i)) is not None:
                    raise error
                last = i == most - 1
                yield Chunk(
                    self.letter, ord(self.letter), "length" if last else None, timings if last else None
                )
            if not most:
                yield Chunk("", None, "length", timings)
        finally:
            self.active -= 1


@dataclass(frozen=True)
class Address:
    port: int
    server: Server | None = None

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, headers or {})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return answer.status, json.loads(text) if is_json else text, dict(answer.headers.items())

    def get(self, path: str, **headers: str) -> tuple[int, Any, dict[str, str]]:
        return self.request("GET", path, None, headers)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, dict[str, str]]:
        return self.request("POST", path, body, headers)

    def events(self, path: str, body: Any) -> list[Any]:
        _, text, _ = self.post(path, body)
        data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return [item if item == "[DONE]" else json.loads(item) for item in data]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=HANG_S)

    def send(self, path: str, body: Any) -> socket.socket:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        sock = self.connect()
        sock.sendall(head.encode() + data)
        return sock


@contextmanager
def served(model: Any, config: Config | None = None, open_: Any = None) -> Iterator[Address]:
    config = config or Config("fake.gguf", "fake", shows_metrics=True)
    with front_served(Service(config, Model(open_ or (lambda progress: model)))) as address:
        if open_ is None:
            until(lambda: address.get("/health")[0] == 200)
        yield address


@contextmanager
def front_served(front: Front) -> Iterator[Address]:
    sock = listen("127.0.0.1", 0)
    server = Server(front, key_file=None, cert_file=None)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    address = Address(sock.getsockname()[1], server)
    try:
        yield address
    finally:
        server.should_exit = True
        thread.join(HANG_S)
        assert not thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds, or until a deadline that only a deadlock exceeds."""
    done = threading.Event()
    for _ in range(int(HANG_S / 0.01)):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("the condition was never met")


@contextmanager
def one_model(*words: str, devices: str = "numpy", process: bool = False) -> Iterator[Address]:
    """Serve as `vkbackend serve` with these words does. Without `process`, the server and its engine run in
    this process, which saves 2 s of CPU time."""
    if process:
        command = Command(*words, devices=devices)
        yield command.address
        assert command.end() == 0, command.log
        return
    args = parse(["serve", "-dev", devices, *words])[0]
    opened = partial(opened_here, serve.LLM)
    with (
        mock.patch.object(serve, "LLM", opened),
        front_served(serve.one_model(args, Console(quiet=True))) as at,
    ):
        until(lambda: at.get("/health")[0] == 200)
        yield at


def opened_here(open_: Callable[..., Any], path: str, **options: Any) -> Any:
    return open_(path, **options | {"process": False})


# for fixtures of `one_model`
PROCESSES = [pytest.param(False, id="here"), pytest.param(True, id="process", marks=pytest.mark.wide)]


class Command:
    """A server process. `log` holds the lines that it printed. `limits` contains soft limits, such as
    RLIMIT_NOFILE."""

    def __init__(
        self, *words: str, devices: str | None = "numpy", limits: Mapping[int, int] | None = None
    ) -> None:
        chosen = [] if devices is None else ["-dev", devices]
        command = [sys.executable, "-m", "vkbackend", "serve", *chosen, "--port", "0", *words]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8")
        for limit, most in (limits or {}).items():
            import resource  # not on Windows

            resource.prlimit(self.process.pid, limit, (most, resource.prlimit(self.process.pid, limit)[1]))
        self.log: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        until(lambda: bool(self._address()) or self.process.poll() is not None)
        assert self._address(), self.log
        self.address = Address(int(self._address()[0]))
        until(lambda: self.address.get("/health")[0] == 200)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)

    def _address(self) -> list[str]:
        return re.findall(r"listening at http://127.0.0.1:(\d+)", "".join(self.log))

    def engine(self) -> int:
        children = (
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            .read_text(encoding="utf-8")
            .split()
        )
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        pids = {
            int(pid) for task in threads for pid in (task / "children").read_text(encoding="utf-8").split()
        } | set(map(int, children))
        engines = [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(engines) == 1, engines
        return engines[0]

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(HANG_S)
