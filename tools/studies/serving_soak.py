"""Tests a server: `python -m vkbackend.tools.studies.serving_soak -m model.gguf -dev 0 --minutes 30`.

Starts `vkbackend serve`, requests greedy texts with known results, reads or drops streams, sends invalid
bodies, and sometimes kills the engine's process. Prints results by kind of request, the time without a model,
wrong texts, slots and sequences still in use, and the server's memory per minute. The exit code is 1 after a
wrong text, a leaked slot, or HTTP status 500.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from vkbackend.models.llm import LLM
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.measure.http_load import Endpoint

PROMPTS = [
    f"Once upon a time there was {who}" for who in ("a cat", "an owl", "two mice", "a small boat", "Tom")
]
N_TOKENS = 24
N_CLIENTS = 8
KILL_EVERY_S = 60.0
READY_S, QUIET_S = 120.0, 20.0
BAD: list[Any] = [
    b"{", b"", b"[" * 100_000, b"\xff\xfe", {"prompt": 3}, {"prompt": []}, {"prompt": "a", "n": 10_000},
    {"prompt": "a", "max_tokens": -7}, {"prompt": "a", "temperature": "hot"}, {"prompt": "a", "stop": 5},
    {"prompt": "x " * 5000},
]  # fmt: skip
CODES_OF_BAD = {400, 413, 422, 429, 503}


class Soak:
    """`wanted` holds the greedy text of each prompt. `seen` counts answers by kind and status."""

    def __init__(self, endpoint: Endpoint, wanted: dict[str, str], seed: int) -> None:
        self.endpoint, self.wanted, self.rng = endpoint, wanted, random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def client(self, until: float) -> None:
        kinds = [self.greedy, self.greedy, self.left, self.streamed, self.bad]
        while time.monotonic() < until:
            kind = self.rng.choice(kinds)
            try:
                async with asyncio.timeout(READY_S):
                    result = await kind()
            except (OSError, ValueError, IndexError, EOFError, TimeoutError) as error:
                result = type(error).__name__
            except Exception as error:  # VkbackendError means that the server is unreachable.
                result = f"{type(error).__name__}: {error}"[:60]
            self.seen[f"{kind.__name__}: {result}"] += 1

    async def greedy(self) -> str:
        prompt = self.rng.choice(PROMPTS)
        body = {"prompt": prompt, "max_tokens": N_TOKENS, "temperature": 0}
        status, _, lines = await self.endpoint.ask("POST", "/completions", body)
        text = b"\n".join([line async for line in lines])
        if status == 200 and (got := json.loads(text)["choices"][0]["text"]) != self.wanted[prompt]:
            self.wrong.append(f"{prompt!r}: {got!r}")
        return str(status)

    async def streamed(self) -> str:
        prompt, text, ended = self.rng.choice(PROMPTS), "", ""
        body = {"prompt": prompt, "max_tokens": N_TOKENS, "temperature": 0, "stream": True}
        status, _, lines = await self.endpoint.ask("POST", "/completions", body)
        async for line in lines:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return f"{status}, an error event"
                text += event["choices"][0]["text"] if event.get("choices") else ""
            elif line.startswith(b"data: [DONE]"):
                ended = "whole"
        if status == 200 and ended and text != self.wanted[prompt]:
            self.wrong.append(f"{prompt!r}, streamed: {text!r}")
        return f"{status}, {ended or 'cut'}"

    async def left(self) -> str:
        body = {"prompt": self.rng.choice(PROMPTS), "max_tokens": 200, "stream": True, "ignore_eos": True}
        status, _, lines = await self.endpoint.ask("POST", "/completions", body)
        n, most = 0, self.rng.randrange(1, 30)
        async for _ in lines:
            if (n := n + 1) >= most:
                break
        await lines.aclose()  # type: ignore[attr-defined]
        return str(status)

    async def bad(self) -> str:
        body = self.rng.choice(BAD)
        reader, writer = await asyncio.open_connection(self.endpoint.host, self.endpoint.port)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        host = f"{self.endpoint.host}:{self.endpoint.port}"
        head = f"POST {self.endpoint.base}/completions HTTP/1.1\r\nHost: {host}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        try:
            writer.write(head.encode() + data)
            await writer.drain()
            status = int((await reader.readline()).split()[1])
        finally:
            writer.close()
        return str(status) if status in CODES_OF_BAD else f"{status}!"

    async def get(self, path: str) -> Any:
        status, _, lines = await self.endpoint.ask("GET", path)
        text = b"\n".join([line async for line in lines])
        return status, json.loads(text)

    async def ready(self) -> None:
        end = time.monotonic() + READY_S
        while True:
            with suppress(Exception):
                if (await self.get("/health"))[0] == 200:
                    return
            if time.monotonic() > end:
                raise SystemExit("the server is not ready")
            await asyncio.sleep(0.2)

    async def quiet(self) -> dict[str, Any]:
        """Wait until no request runs, then return the engine's counters."""
        end = time.monotonic() + QUIET_S
        while True:
            stats: dict[str, Any] = (await self.get("/stats"))[1].get("engine", {})
            if (not stats.get("n_running") and not stats.get("n_waiting")) or time.monotonic() > end:
                return stats
            await asyncio.sleep(0.2)


def children(pid: int) -> list[int]:
    """Return the child processes of all threads."""
    pids: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
            pids += [int(word) for word in file.read().split()]
    return pids


def engine_of(pid: int) -> int | None:
    for child in children(pid):
        with suppress(OSError), open(f"/proc/{child}/cmdline", "rb") as file:
            if b"spawn_main" in file.read():
                return child
    return None


def rss_mib(pid: int) -> float:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024


async def run(args: argparse.Namespace, soak: Soak, server: subprocess.Popen[bytes]) -> bool:
    await soak.ready()
    end = time.monotonic() + 60 * args.minutes
    clients = [asyncio.ensure_future(soak.client(end)) for _ in range(N_CLIENTS)]
    n_kills, memory, next_kill = 0, [rss_mib(server.pid)], time.monotonic() + KILL_EVERY_S / 2
    began, n_looks, n_away = time.monotonic(), 0, 0
    while time.monotonic() < end:
        await asyncio.sleep(1)
        with suppress(Exception):
            n_looks, n_away = n_looks + 1, n_away + ((await soak.get("/health"))[0] != 200)
        if time.monotonic() - began >= 60 * len(memory):
            memory.append(rss_mib(server.pid))
            print(
                f"{len(memory) - 1} min: server {memory[-1]:.1f} MiB, {sum(soak.seen.values())} answers",
                flush=True,
            )
        if time.monotonic() > next_kill and (engine := engine_of(server.pid)):
            os.kill(engine, signal.SIGKILL)
            n_kills, next_kill = n_kills + 1, time.monotonic() + KILL_EVERY_S
    await asyncio.gather(*clients)
    await soak.ready()
    stats = await soak.quiet()
    for kind, times in sorted(soak.seen.items()):
        print(f"{times:8d}  {kind}")
    taken = stats.get("n_slots", 0) - stats.get("n_slots_free", 0)
    print(f"engines killed {n_kills}; no model in {n_away} of {n_looks} looks, one a second")
    print(f"wrong greedy texts {len(soak.wrong)}; slots taken {taken}, "
          f"sequences {stats.get('n_running')} running and {stats.get('n_waiting')} waiting")  # fmt: skip
    print("MiB of the server by the minute: " + " ".join(f"{mib:.0f}" for mib in memory))
    for line in soak.wrong[:5]:
        print(f"wrong: {line}")
    failed = [kind for kind in soak.seen if ": 500" in kind or kind.endswith("!")]
    return not (soak.wrong or taken or failed)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vkbackend.tools.studies.serving_soak", description=__doc__
    )
    parser.add_argument("-m", "--model", default=demo_model(), help="the model (default: the demo's)")
    parser.add_argument("-dev", "--device", default="0", help="device list (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=30, help="how long (default: %(default)s)")
    args = parser.parse_args()
    with LLM(args.model, devices=args.device.split(","), n_ctx=512) as llm:
        wanted = {p: llm.generate(p, N_TOKENS, temperature=0).text for p in PROMPTS}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vkbackend", "serve", "-m", args.model, "-dev", args.device, "-np", "4",
               "-c", "2048", "--port", str(port)]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        soak = Soak(Endpoint.of(f"http://127.0.0.1:{port}/v1"), wanted, seed=1)
        right = asyncio.run(run(args, soak, server))
    finally:
        server.terminate()
        server.wait(60)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
