"""Counters in Prometheus' text format. Counters that llama-server also has use its names."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Figure = Callable[..., None]  # Adds a metric to the text.
EXPERTS = {
    "n_expert_hits": "Uses of experts in device memory (docs/experts.md).",
    "n_expert_misses": "Uses of experts in host memory.",
    "n_experts_replaced": "Experts copied to device memory since the start.",
}
KEPT_BLOCKS = {
    "cache_ram_bytes": ("gauge", "Bytes of blocks of the KV cache in host memory (--cache-ram)."),
    "cache_disk_bytes": ("gauge", "Bytes of files with blocks, of all models (--cache-disk)."),
    "n_blocks_kept": ("counter", "Blocks copied from the devices since the start."),
    "n_blocks_restored": ("counter", "Blocks copied back since the start."),
    "n_blocks_refused": ("counter", "Files with blocks that were damaged or foreign."),
}
BUCKETS = 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0


@dataclass(slots=True)
class Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

    def lines(self, name: str) -> Iterator[str]:
        so_far = 0
        for bound, n in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            so_far += n
            yield f'{name}_bucket{{le="{bound}"}} {so_far}'
        yield f"{name}_sum {self.total}"
        yield f"{name}_count {so_far}"


@dataclass(slots=True)
class Metrics:
    """`requests` counts requests by (route, status)."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_s: float = 0.0
    tokens: int = 0
    decode_s: float = 0.0
    longest: int = 0
    _scraped: tuple[int, float, int, float] = (0, 0.0, 0, 0.0)  # `counts` of the last scrape
    cancelled: int = 0
    first_token: Histogram = field(default_factory=Histogram)
    whole_request: Histogram = field(default_factory=Histogram)

    def _drafts(self, figure: Figure, add: Figure, stats: Mapping[str, Any]) -> None:
        name = "llamacpp:spec_decode_num_"
        figure(f"{name}drafts_total", "counter", "Drafts verified.", stats["n_drafts"])
        figure(f"{name}draft_tokens_total", "counter", "Tokens drafted.", stats["n_drafted"])
        figure(f"{name}accepted_tokens_total", "counter", "Drafted tokens accepted.", stats["n_accepted"])
        name += "accepted_tokens_per_pos_total"
        counts = enumerate(stats["n_accepted_at"])
        add(name, "counter", "Drafted tokens accepted, by their position in the draft.",
            *(f'{name}{{position="{at}"}} {n}' for at, n in counts))  # fmt: skip

    def text(self, now: Mapping[str, Any], stats: Mapping[str, Any]) -> str:
        """Return all metrics. `stats` are the engine's statistics. `now` contains other values with help
        texts."""
        lines: list[str] = []

        def add(name: str, kind: str, help_text: str, *values: str) -> None:
            lines.extend((f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", *values))

        def figure(name: str, kind: str, help_text: str, value: float) -> None:
            add(name, kind, help_text, f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")

        computed = self.prompt_tokens - self.cached_tokens
        figure("llamacpp:prompt_tokens_total", "counter", "Prompt tokens computed.", computed)
        figure("llamacpp:prompt_seconds_total", "counter", "Seconds spent on prompts.", self.prompt_s)
        figure("llamacpp:tokens_predicted_total", "counter", "Tokens generated.", self.tokens)
        figure(
            "llamacpp:tokens_predicted_seconds_total", "counter", "Seconds spent generating.", self.decode_s
        )
        counts = computed, self.prompt_s, self.tokens, self.decode_s
        n_prompt, prompt_s, n_tokens, decode_s = (
            now_ - before for now_, before in zip(counts, self._scraped, strict=True)
        )
        self._scraped = counts
        figure("llamacpp:prompt_tokens_seconds", "gauge", "Prompt tokens per second since the last request.",
               n_prompt / prompt_s if prompt_s else 0.0)  # fmt: skip
        figure("llamacpp:predicted_tokens_seconds", "gauge",
               "Tokens generated per second and sequence since the last request.",
               n_tokens / decode_s if decode_s else 0.0)  # fmt: skip
        figure("llamacpp:prompt_tokens_cached_total", "counter", "Prompt tokens taken from the cache.",
               self.cached_tokens)  # fmt: skip
        if "n_drafts" in stats:
            self._drafts(figure, add, stats)
        n_steps = stats.get("n_steps", 0)
        figure("llamacpp:n_busy_slots_per_decode", "gauge", "Tokens generated per engine step.",
               self.tokens / n_steps if n_steps else 0.0)  # fmt: skip
        figure("llamacpp:n_tokens_max", "counter", "Longest context so far.", self.longest)
        figure("llamacpp:n_decode_total", "counter", "Engine steps.", stats.get("n_steps", 0))
        lines += lines_of(now)
        figure(
            "vkbackend:requests_cancelled_total",
            "counter",
            "Requests whose client disconnected.",
            self.cancelled,
        )
        for name in ("cells", "cells_used", "cells_cached", "cells_shared", "n_preempted"):
            kind = "counter" if name == "n_preempted" else "gauge"
            figure(f"vkbackend:{name}", kind, f"The engine's {name} (docs/engine.md).", stats.get(name, 0))
        for name, of in EXPERTS.items():
            if name in stats:
                figure(f"vkbackend:{name}_total", "counter", of, stats[name])
        for name, (kind, of) in KEPT_BLOCKS.items():
            if name in stats:
                total = "_total" if kind == "counter" else ""
                figure(f"vkbackend:{name}{total}", kind, of, stats[name])
        lines += self.request_lines()
        name = "vkbackend:time_to_first_token_seconds"
        add(name, "histogram", "From the request to its first token.", *self.first_token.lines(name))
        name = "vkbackend:request_seconds"
        add(name, "histogram", "From the request to its end.", *self.whole_request.lines(name))
        return "\n".join(lines) + "\n"

    def request_lines(self) -> list[str]:
        name = "vkbackend:requests_total"
        rows = [
            f'{name}{{route="{route}",status="{status}"}} {n}'
            for (route, status), n in sorted(self.requests.items())
        ]
        return [f"# HELP {name} Requests by route and status.", f"# TYPE {name} counter", *rows]


def lines_of(figures: Mapping[str, tuple[float, str]]) -> list[str]:
    """Return the text lines of {name: (value, help text)}. A name that ends in _total is a counter."""
    lines = []
    for name, (value, help_text) in figures.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", f"{name} {shown}"]
    return lines
