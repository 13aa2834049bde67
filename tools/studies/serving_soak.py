"""Tests a server: `python -m vkbackend.tools.studies.serving_soak -m model.gguf -dev 0 --minutes 120`.

Starts `vkbackend serve` with adapters, drafts of n-grams and of a draft model, and a small KV cache whose
blocks move to host memory and to files. Clients request greedy and structured texts with known results, with
and without images, through four APIs. Clients also drop streams, hang up while a body is sent or an image is
computed, and send invalid bodies and images. Sometimes the engine's process is killed. Prints results by kind
of request, the time without a model, wrong texts, and slots and sequences that are still in use. Also prints
the engine's counters, and the memory and open files of each minute. The exit code is 1 after a wrong text, a
leaked slot, or HTTP status 500.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vkbackend.tools.flags.text import vision_demo
from vkbackend.tools.measure.http_load import Endpoint
from vkbackend.tools.studies.soak_images import bad_image, files_of_images
from vkbackend.tools.studies.soak_requests import Known, known_requests, piece_of, text_of, write_adapters

N_CLIENTS = 8
N_KNOWN = 60
READY_S, QUIET_S = 120.0, 20.0
BUSY_S = 30.0  # all clients send, then only two, because drafts save time in small batches
COUNTERS = "n_requests", "n_steps", "n_drafted", "n_accepted", "n_blocks_restored", "n_preempted"
BAD: list[Any] = [
    b"{", b"", b"[" * 100_000, b"\xff\xfe", {"prompt": 3}, {"prompt": []}, {"prompt": "a", "n": 10_000},
    {"prompt": "a", "max_tokens": -7}, {"prompt": "a", "temperature": "hot"}, {"prompt": "a", "stop": 5},
    {"prompt": "x " * 5000},
]  # fmt: skip
LAST_EVENTS = "message_stop", "response.completed", "response.incomplete"
HANG_UP_S = 0.1
SHOWN = 600  # number of letters that are printed at each end of a wrong request
CODES_OF_BAD = {400, 413, 422, 429, 503}


class Soak:
    """`seen` counts answers by kind and status. `files` are images for invalid requests. `counters` adds up
    the counters of all engine processes."""

    def __init__(self, endpoint: Endpoint, known: list[Known], files: list[bytes], seed: int) -> None:
        self.endpoint, self.known, self.files, self.rng = endpoint, known, files, random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.counters: Counter[str] = Counter()
        self._last: dict[str, int] = {}
        self.wrong: list[str] = []

    async def client(self, number: int, until: float) -> None:
        kinds = [self.greedy, self.greedy, self.left, self.streamed, self.bad, self.hung_up]
        kinds += [self.bad_image] if self.files else []
        while time.monotonic() < until:
            if number >= 2 and time.monotonic() % (2 * BUSY_S) > BUSY_S:
                await asyncio.sleep(1)
                continue
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
        known = self.rng.choice(self.known)
        status, _, lines = await self.endpoint.ask("POST", known.path, known.body)
        text = b"\n".join([line async for line in lines])
        if status == 200 and (got := text_of(known.path, json.loads(text))) != known.text:
            self.wrong.append(f"{known}: {got!r}")
        return str(status)

    async def streamed(self) -> str:
        known, text, ended = self.rng.choice(self.known), "", ""
        status, _, lines = await self.endpoint.ask("POST", known.path, known.body | {"stream": True})
        async for line in lines:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event.get("error") or event.get("type") == "response.failed":
                    return f"{status}, an error event"
                text += piece_of(event)
                ended = "whole" if event.get("type") in LAST_EVENTS else ended
            elif line.startswith(b"data: [DONE]"):
                ended = "whole"
        if status == 200 and ended and text != known.text:
            self.wrong.append(f"{known}, streamed: {text!r}")
        return f"{status}, {ended or 'cut'}"

    async def left(self) -> str:
        known = self.rng.choice(self.known)
        limit = "max_output_tokens" if known.path == "/responses" else "max_tokens"
        body = known.body | {limit: 200, "stream": True, "ignore_eos": True}
        status, _, lines = await self.endpoint.ask("POST", known.path, body)
        n, most = 0, self.rng.randrange(1, 30)
        async for _ in lines:
            if (n := n + 1) >= most:
                break
        await lines.aclose()  # type: ignore[attr-defined]
        return str(status)

    async def hung_up(self) -> str:
        known = self.rng.choice(self.known)
        data = self.request(known.path, json.dumps(known.body).encode())
        _, writer = await asyncio.open_connection(self.endpoint.host, self.endpoint.port)
        writer.write(data[: self.rng.randrange(1, len(data))] if self.rng.random() < 0.5 else data)
        with suppress(OSError):
            await writer.drain()
            await asyncio.sleep(self.rng.random() * HANG_UP_S)
        writer.close()
        return "closed"

    async def bad(self) -> str:
        body = self.rng.choice(BAD)
        return await self.refused(
            "/completions", body if isinstance(body, bytes) else json.dumps(body).encode()
        )

    async def bad_image(self) -> str:
        path, body = bad_image(self.rng, self.files)
        return await self.refused(path, json.dumps(body).encode())

    def request(self, path: str, data: bytes) -> bytes:
        host = f"{self.endpoint.host}:{self.endpoint.port}"
        head = f"POST {self.endpoint.base}{path} HTTP/1.1\r\nHost: {host}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        return head.encode() + data

    async def refused(self, path: str, data: bytes) -> str:
        reader, writer = await asyncio.open_connection(self.endpoint.host, self.endpoint.port)
        try:
            writer.write(self.request(path, data))
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

    async def count(self) -> None:
        """Add the engine's counts since the last call. A new engine process begins at 0."""
        stats = (await self.get("/stats"))[1].get("engine", {})
        now = {name: int(stats[name]) for name in COUNTERS if name in stats}
        for name, value in now.items():
            before = self._last.get(name, 0)
            self.counters[name] += value - before if value >= before else value
        self._last = now

    async def quiet(self) -> dict[str, Any]:
        """Wait until no request runs, then return the engine's counters. A new engine has none yet."""
        end = time.monotonic() + QUIET_S
        while True:
            stats: dict[str, Any] = (await self.get("/stats"))[1].get("engine", {})
            is_idle = stats and not stats.get("n_running") and not stats.get("n_waiting")
            if is_idle or time.monotonic() > end:
                return stats
            await asyncio.sleep(0.2)


def children(pid: int) -> list[int]:
    pids: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="utf-8") as file:
            pids += [int(word) for word in file.read().split()]
    return pids


def engine_of(pid: int) -> int | None:
    for child in children(pid):
        with suppress(OSError), open(f"/proc/{child}/cmdline", "rb") as file:
            if b"spawn_main" in file.read():
                return child
    return None


def rss_mib(pid: int) -> float:
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024


def sizes(server: int) -> str:
    texts = []
    for pid in filter(None, (server, engine_of(server))):
        with suppress(OSError, StopIteration):
            texts.append(f"{rss_mib(pid):.1f} MiB and {len(os.listdir(f'/proc/{pid}/fd'))} files")
    return ", engine ".join(texts)


async def run(args: argparse.Namespace, soak: Soak, server: subprocess.Popen[bytes]) -> bool:
    await soak.ready()
    end = time.monotonic() + 60 * args.minutes
    clients = [asyncio.ensure_future(soak.client(i, end)) for i in range(N_CLIENTS)]
    n_kills, next_kill = 0, time.monotonic() + (args.kill_every / 2 or math.inf)
    began, n_looks, n_away, n_minutes, is_open = time.monotonic(), 0, 0, 0, True
    while time.monotonic() < end:
        await asyncio.sleep(1)
        with suppress(Exception):
            is_open = (await soak.get("/health"))[0] == 200
            n_looks, n_away = n_looks + 1, n_away + (not is_open)
            await soak.count()
        if time.monotonic() - began >= 60 * n_minutes:
            print(f"{n_minutes} min: server {sizes(server.pid)}; {sum(soak.seen.values())} answers, "
                  f"{len(soak.wrong)} wrong", flush=True)  # fmt: skip
            n_minutes += 1
        if time.monotonic() > next_kill and is_open and (engine := engine_of(server.pid)):
            os.kill(engine, signal.SIGKILL)
            n_kills, next_kill = n_kills + 1, time.monotonic() + args.kill_every
    await asyncio.gather(*clients)
    await soak.ready()
    stats = await soak.quiet()
    await soak.count()
    for kind, times in sorted(soak.seen.items()):
        print(f"{times:8d}  {kind}")
    taken = stats["n_slots"] - stats["n_slots_free"] if stats else "unknown"
    print(f"engines killed {n_kills}; no model in {n_away} of {n_looks} looks, one a second")
    print(f"wrong texts {len(soak.wrong)}; slots taken {taken}, "
          f"sequences {stats.get('n_running')} running and {stats.get('n_waiting')} waiting")  # fmt: skip
    print("engine: " + ", ".join(f"{name} {count}" for name, count in soak.counters.items()))
    print(f"at the end: server {sizes(server.pid)}")
    for line in soak.wrong[:5]:
        print(f"wrong: {line[:SHOWN]} ... {line[-SHOWN:]}")
    failed = [kind for kind in soak.seen if ": 500" in kind or kind.endswith("!")]
    return not (soak.wrong or taken or failed)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vkbackend.tools.studies.serving_soak", description=__doc__
    )
    parser.add_argument("-m", "--model", help="a llama model (default: the vision demo, with its projector)")
    parser.add_argument("-mm", "--mmproj", help="the model's projector; without one, no request has images")
    parser.add_argument("-md", "--model-draft", help="the draft model (default: the model)")
    parser.add_argument("-dev", "--device", default="0", help="device list (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=120, help="how long (default: %(default)s)")
    parser.add_argument("--kill-every", type=float, default=60, metavar="S",
                        help="seconds between kills of the engine of an open model (0: none)")  # fmt: skip
    args = parser.parse_args()
    if args.model is None:
        args.model, args.mmproj = vision_demo()
    with TemporaryDirectory(prefix="soak-") as folder:
        adapters = write_adapters(args.model, Path(folder))
        known = known_requests(args.model, args.mmproj, args.device.split(","), adapters, 1, N_KNOWN)
        print(f"{len(known)} requests without a tie: {dict(Counter(request.path for request in known))}",
              flush=True)  # fmt: skip
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [
            sys.executable, "-m", "vkbackend", "serve", "-m", args.model, "-dev", args.device, "-np", "4",
            "-c", "512",
            "--kv-cells", "1536", "--exact", "--spec-type", "ngram,draft-simple", "-md",
            args.model_draft or args.model,
            "--lora", ",".join(f"{name}={path}" for name, path in adapters.items()),
            "--lora-init-without-apply",
            "--cache-ram", "1", "--cache-disk", f"{folder}/kv", "--cache-disk-size", "64", "--port",
            str(port), *(["--mmproj", args.mmproj] if args.mmproj else []),
        ]  # fmt: skip
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            soak = Soak(Endpoint.of(f"http://127.0.0.1:{port}/v1"), known,
                        files_of_images() if args.mmproj else [], seed=1)  # fmt: skip
            right = asyncio.run(run(args, soak, server))
        finally:
            server.terminate()
            server.wait(60)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
