"""Measures the total rate of concurrent callers and the latency of each caller.

Each caller requests several texts in turn, with prompts of different lengths. Every second prompt has a
common prefix. An untimed round first records and compiles every step.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vkbackend.models.llm import LLM

LENGTHS = 8, 24, 64, 160  # numbers of tokens after the shared prefix, in turn
SHARED = 64
WARM_UP = 4  # Tokens per text in the untimed round.


@dataclass(frozen=True, slots=True)
class Load:
    """Total tokens per second of `n` callers, their latencies in milliseconds, and the share of prompt tokens
    from the cache. `accepted` is the share of drafted tokens that were right, or None without drafts."""

    n: int
    process: bool
    tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    hit_rate: float
    accepted: float | None = None

    def record(self) -> dict[str, Any]:
        return asdict(self)


def longest(n_gen: int) -> int:
    return SHARED + max(LENGTHS) + n_gen


def prompts(n_vocab: int, seed: int) -> Callable[[], list[int]]:
    rng = random.Random(seed)
    shared = [random.Random(-1).randrange(n_vocab) for _ in range(SHARED)]
    count = seed

    def one() -> list[int]:
        nonlocal count
        count += 1
        tail = [rng.randrange(n_vocab) for _ in range(LENGTHS[count % len(LENGTHS)])]
        return (shared if count // len(LENGTHS) % 2 else []) + tail

    return one


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def measure(llm: LLM, n: int, n_requests: int, n_gen: int, *, process: bool) -> Load:
    asyncio.run(_round(llm, n, 1, WARM_UP, 0))
    asyncio.run(_round(llm, n, 1, n_gen, 1000))
    before = llm.stats()
    began = time.perf_counter()
    times = asyncio.run(_round(llm, n, n_requests, n_gen, 2000))
    took = time.perf_counter() - began
    after = llm.stats()
    first = [1e3 * text[0] for text in times]
    later = [1e3 * gap for text in times for gap in text[1:]]
    asked = after["prompt_tokens"] - before["prompt_tokens"]
    drafted, right = (after.get(name, 0) - before.get(name, 0) for name in ("n_drafted", "n_accepted"))
    cached = after["prompt_tokens_cached"] - before["prompt_tokens_cached"]
    return Load(
        n,
        process,
        sum(map(len, times)) / took,
        statistics.median(first),
        quantile(first, 0.99),
        statistics.median(later),
        quantile(later, 0.99),
        cached / asked,
        right / drafted if drafted else None,
    )


async def _round(llm: LLM, n: int, n_requests: int, n_gen: int, seed: int) -> list[list[float]]:
    """For each text, return the seconds to the first token and between consecutive tokens."""

    async def caller(i: int) -> list[list[float]]:
        prompt, texts = prompts(llm.n_vocab, seed + i), []
        for _ in range(n_requests):
            last, gaps = time.perf_counter(), []
            async for _ in llm.astream(prompt(), n_gen, ignore_eos=True, seed=i):
                now = time.perf_counter()
                gaps.append(now - last)
                last = now
            texts.append(gaps)
        return texts

    return [text for texts in await asyncio.gather(*map(caller, range(n))) for text in texts]
