"""Measures the server's cost: `python -m vkbackend.tools.studies.serving -m MODEL -dev 0 [-np 16] [-n 128]`.

Alternates three runs. The first run calls `agenerate`, with the engine in a separate process. The second run
streams the same texts over HTTP. The third run streams the same bytes at the same rate from a minimal server
(Starlette, uvicorn). CPU time includes only the server process.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vkbackend.errors import VkbackendError
from vkbackend.models.llm import LLM
from vkbackend.tools.measure.http_load import WORDS, Endpoint, Text, model_of, text_of

N_CTX = 512


def words(i: int) -> str:
    return " ".join(random.Random(i).choices(WORDS, k=24))


def body(i: int, n_gen: int) -> dict[str, object]:
    return {"prompt": words(i), "max_tokens": n_gen, "stream": True, "ignore_eos": True, "temperature": 0,
            "stream_options": {"include_usage": True}}  # fmt: skip


@contextmanager
def command(*arguments: str) -> Iterator[tuple[int, Endpoint]]:
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments], stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    urls: list[str] = []
    assert process.stderr is not None
    for line in process.stderr:
        if urls := re.findall(r"listening at (http://\S+)", line):
            break
    threading.Thread(target=process.stderr.read, daemon=True).start()
    try:
        if not urls:
            raise SystemExit("the server did not start")
        endpoint = Endpoint.of(urls[0])
        asyncio.run(_ready(endpoint))
        yield process.pid, endpoint
    finally:
        process.terminate()
        process.wait(60)


async def _ready(endpoint: Endpoint) -> None:
    while True:
        with suppress(VkbackendError):
            if (await endpoint.ask("GET", "/health"))[0] == 200:
                return
        await asyncio.sleep(0.1)


def cpu_s(pid: int) -> float:
    nanoseconds = 0
    for path in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            nanoseconds += int((path / "schedstat").read_text(encoding="utf-8").split()[0])
    return nanoseconds / 1e9


async def clients(endpoint: Endpoint, n: int, n_gen: int, seed: int) -> list[Text]:
    asked = [text_of(endpoint, "/completions", body(seed + i, n_gen)) for i in range(n)]
    return await asyncio.gather(*asked)


async def direct(llm: LLM, n: int, n_gen: int, seed: int) -> int:
    prompts = [words(seed + i) for i in range(n)]
    done: Any = await llm.agenerate(prompts, n_gen, ignore_eos=True, temperature=0)
    return sum(len(text.tokens) for text in done)


def bare(n_events: int, n_bytes: int, pause_us: int) -> None:
    """Run the minimal server, which sends `n_events` events of `n_bytes` bytes every `pause_us`."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    data = b"data: " + b"x" * (n_bytes - 8) + b"\n\n"

    async def events() -> AsyncIterator[bytes]:
        for _ in range(n_events):
            if pause_us:
                await asyncio.sleep(pause_us / 1e6)
            yield data

    async def stream(request: Request) -> Response:
        await request.body()
        return StreamingResponse(events(), media_type="text/event-stream")

    async def health(request: Request) -> Response:
        return Response(b"{}")

    app = Starlette(routes=[Route("/completions", stream, methods=["POST"]), Route("/health", health)])
    config = uvicorn.Config(app, port=0, http="httptools", log_config=None, access_log=False)
    sock = config.bind_socket()
    print(f"listening at http://127.0.0.1:{sock.getsockname()[1]}", file=sys.stderr, flush=True)
    uvicorn.Server(config).run(sockets=[sock])


async def drain(endpoint: Endpoint, n: int) -> None:
    async def one() -> None:
        _, _, lines = await endpoint.ask("POST", "/completions", body(0, 1))
        async for _ in lines:
            pass

    await asyncio.gather(*(one() for _ in range(n)))


def bare_us(n: int, n_events: int, n_bytes: int, pause_us: int) -> float:
    name = "vkbackend.tools.studies.serving"
    with command(name, "--bare", f"{n_events},{n_bytes},{pause_us}") as (pid, endpoint):
        asyncio.run(drain(endpoint, n))
        before = cpu_s(pid)
        asyncio.run(drain(endpoint, n))
        return 1e6 * (cpu_s(pid) - before) / (n * n_events)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-m", "--model")
    add("-dev", "--device", default="numpy")
    add("-np", type=int, default=16, help="clients")
    add("-n", type=int, default=128, help="tokens of a text")
    add("-r", type=int, default=5, help="rounds")
    add("--bare", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        bare(*map(int, args.bare.split(",")))
        return
    from vkbackend.tools.flags.text import demo_model

    path, n, n_gen = args.model or demo_model(), args.np, args.n
    flags = ["-m", path, "-dev", args.device, "-np", str(n), "-c", str(N_CTX), "--kv-cells", str(n * N_CTX)]
    rates: dict[str, list[float]] = {"direct": [], "http": []}
    cpu_us, gaps, n_bytes, errors = [], [], [], 0
    options = {"devices": args.device, "n_slots": n, "n_ctx": N_CTX, "process": True}
    with (
        LLM(path, **options) as llm,
        command("vkbackend", "serve", *flags, "--port", "0", "--log-disable") as (
            pid,
            endpoint,
        ),
    ):
        asyncio.run(model_of(endpoint))
        for turn in range(-1, args.r):
            seed = 1000 * (turn + 2)
            began = time.perf_counter()
            n_tokens = asyncio.run(direct(llm, n, n_gen, seed))
            direct_rate = n_tokens / (time.perf_counter() - began)
            before, began = cpu_s(pid), time.perf_counter()
            texts = asyncio.run(clients(endpoint, n, n_gen, seed))
            took, spent = time.perf_counter() - began, cpu_s(pid) - before
            if turn < 0:
                continue
            rates["direct"].append(direct_rate)
            rates["http"].append(sum(text.n_tokens for text in texts) / took)
            n_events = sum(len(text.times) for text in texts)
            cpu_us.append(1e6 * spent / n_events)
            gaps += [b - a for text in texts for a, b in zip(text.times, text.times[1:], strict=False)]
            n_bytes += [text.n_bytes // max(1, len(text.times)) for text in texts]
            errors += sum(text.error is not None for text in texts)
    ratios = [a / b for a, b in zip(rates["http"], rates["direct"], strict=True)]
    pause_us, size = round(1e6 * statistics.median(gaps)), round(statistics.median(n_bytes))
    print(f"{n} clients, {n_gen} tokens each, {args.r} rounds; {errors} errors")
    for name, values in rates.items():
        print(f"{name:8} {statistics.median(values):8.1f} tokens/s ({min(values):.1f} to {max(values):.1f})")
    print(f"ratio    {statistics.median(ratios):8.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    ours = statistics.median(cpu_us)
    print(f"CPU of the server for an event of {size} bytes: {ours:.0f} us")
    for pause in (pause_us, 0):
        others = [bare_us(n, n_gen, size, pause) for _ in range(args.r)]
        other = statistics.median(others)
        print(f"bare, an event every {pause} us: {other:.0f} us, ratio {ours / other:.2f}")


if __name__ == "__main__":
    main()
