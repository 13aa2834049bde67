"""Streaming clients that measure the latencies of an OpenAI endpoint.

The clients use only asyncio, so they need no packages and little CPU time.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from vkbackend.errors import InvalidArgument, VkbackendError
from vkbackend.tools.measure.parallel import quantile

WORDS = "the a cat dog house river green old walks sees finds under over near friend little day night".split()
LENGTHS = 8, 24, 64, 160  # The prompts have these numbers of words, in turn.
TIMEOUT_S = 300.0
LINE = 1 << 20  # Maximum bytes of an event.


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's base address, to which clients append /completions and /chat/completions."""

    host: str
    port: int
    base: str
    tls: bool
    key: str | None = None

    @classmethod
    def of(cls, url: str, key: str | None = None) -> Endpoint:
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            parts, port = urlsplit(""), 0
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidArgument(f"url={url!r}: expected http://HOST:PORT/v1 or https://...", argument="url")
        return cls(parts.hostname, port, parts.path.rstrip("/"), parts.scheme == "https", key)

    async def ask(
        self, method: str, path: str, body: Any = None
    ) -> tuple[int, dict[str, str], AsyncIterator[bytes]]:
        """Send a request on a new connection. Return status, headers and lines. Raises VkbackendError."""
        context = ssl.create_default_context() if self.tls else None
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port, ssl=context, limit=LINE)
        except OSError as error:
            raise VkbackendError(f"{self.host}:{self.port} cannot be reached: {error}") from None
        data = b"" if body is None else json.dumps(body).encode()
        head = [f"{method} {self.base}{path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Connection: close",
                "Content-Type: application/json", f"Content-Length: {len(data)}"]  # fmt: skip
        head += [f"Authorization: Bearer {self.key}"] if self.key else []
        writer.write("\r\n".join([*head, "", ""]).encode() + data)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        headers = {}
        while (line := await reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        return status, headers, _lines(reader, writer, chunked)


async def _lines(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chunked: bool
) -> AsyncIterator[bytes]:
    rest = b""
    try:
        while True:
            if chunked:
                size = int((await reader.readline()).split(b";")[0] or b"0", 16)
                piece = await reader.readexactly(size) if size else b""
                await reader.readline()
            else:
                piece = await reader.read(65536)
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line
            if not piece:
                yield rest
                return
    finally:
        writer.close()


@dataclass(slots=True)
class Text:
    """A streamed answer, with the seconds of the request and of each event, and the server's token count."""

    began: float
    times: list[float] = field(default_factory=list)
    n_tokens: int = 0
    n_bytes: int = 0
    error: str | None = None


async def text_of(endpoint: Endpoint, path: str, body: dict[str, Any]) -> Text:
    text = Text(time.perf_counter())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            status, _, lines = await endpoint.ask("POST", path, body)
            async for line in lines:
                if status != 200:
                    text.error = text.error or f"HTTP {status}"
                    continue
                if line.startswith(b"data: {"):
                    _take(text, line)
                elif line.startswith(b"data: [DONE]"):
                    break
    except (
        OSError,
        ValueError,
        IndexError,
        asyncio.IncompleteReadError,
        TimeoutError,
        VkbackendError,
    ) as error:
        text.error = f"{type(error).__name__}: {error}"
    if not text.error and not text.times:
        text.error = "no event came"
    return text


def _take(text: Text, line: bytes) -> None:
    now = time.perf_counter()
    text.n_bytes += len(line) + 2
    event = json.loads(line[6:])
    if event.get("error"):
        text.error = str(event["error"].get("message", event["error"]))
    if event.get("usage"):
        text.n_tokens = int(event["usage"]["completion_tokens"])
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or choice
        if any(delta.get(name) for name in ("text", "content", "reasoning_content", "tool_calls")):
            text.times.append(now)
            return


@dataclass(frozen=True, slots=True)
class HttpLoad:
    """Total tokens per second of `n` clients, milliseconds to the first event and between events, and the
    number of failed answers."""

    n: int
    n_texts: int
    n_errors: int
    tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    errors: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        return asdict(self)


def load_of(n: int, texts: Sequence[Text], took_s: float) -> HttpLoad:
    good = [text for text in texts if not text.error]
    first = [1e3 * (text.times[0] - text.began) for text in good] or [float("nan")]
    gaps = [1e3 * (b - a) for text in good for a, b in zip(text.times, text.times[1:], strict=False)]
    gaps = gaps or [float("nan")]
    tokens = sum(text.n_tokens or len(text.times) for text in good)
    return HttpLoad(
        n, len(texts), len(texts) - len(good), tokens / took_s,
        statistics.median(first), quantile(first, 0.99), statistics.median(gaps), quantile(gaps, 0.99),
        tuple(sorted({text.error for text in texts if text.error})),
    )  # fmt: skip


def body_of(api: str, model: str, words: Sequence[str], n_gen: int, seed: int) -> tuple[str, dict[str, Any]]:
    prompt = " ".join(words)
    shared = {"model": model, "max_tokens": n_gen, "stream": True, "seed": seed, "ignore_eos": True,
              "stream_options": {"include_usage": True}}  # fmt: skip
    if api == "chat":
        return "/chat/completions", shared | {"messages": [{"role": "user", "content": prompt}]}
    return "/completions", shared | {"prompt": prompt}


async def model_of(endpoint: Endpoint) -> str:
    """Raises VkbackendError."""
    status, _, lines = await endpoint.ask("GET", "/models")
    text = b"\n".join([line async for line in lines])
    try:
        if status == 200:
            return str(json.loads(text)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        pass
    raise VkbackendError(
        f"GET {endpoint.base}/models answered {status} without a model; name one with --model"
    )


async def measure(endpoint: Endpoint, api: str, model: str, n: int, n_texts: int, n_gen: int) -> HttpLoad:
    """Run `n` clients at once, each of which requests several texts one after another."""

    async def client(i: int) -> list[Text]:
        rng, texts = random.Random(i), []
        for turn in range(n_texts):
            words = rng.choices(WORDS, k=LENGTHS[(i + turn) % len(LENGTHS)])
            texts.append(await text_of(endpoint, *body_of(api, model, words, n_gen, i)))
        return texts

    began = time.perf_counter()
    texts = [text for some in await asyncio.gather(*map(client, range(n))) for text in some]
    return load_of(n, texts, time.perf_counter() - began)
