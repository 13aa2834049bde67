from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from vkbackend.models.engine.messages import PromptProgress, Timings
from vkbackend.models.sampling.logprobs import Logprobs


@dataclass(slots=True)  # a frozen class would cost 2 us per token
class Chunk:
    """`text` is the text that `token` completed, and may be empty. Only the last chunk has a `finish_reason`.
    Unless `timings_per_token` is set, only the last chunk has `timings`. If `echo` or `prompt_logprobs` is
    set, the first chunk is the prompt. If `prompt_progress` is set, chunks with a `progress` and no token
    come before the first token."""

    text: str
    token: int | None  # None if max_tokens is 0 or the chunk is the prompt.
    # "stop" means a stop token or a stop string. "length" means max_tokens or the end of the context.
    finish_reason: str | None = None
    timings: dict[str, float] | None = None
    slot: int = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    progress: PromptProgress | None = None
    n_discarded: int = 0  # In the last chunk: how many tokens context shifts have discarded.

    @property
    def truncated(self) -> bool:
        """Return whether a context shift has discarded tokens of this sequence."""
        return self.n_discarded > 0


@dataclass(frozen=True, slots=True)
class Completion:
    """`tokens` are the generated ids, including the stop token. The sequence is in `slot` until another
    sequence uses the slot. `logprobs` contains an entry per generated token. `prompt_logprobs` contains an
    entry per prompt token, and None for the first. `truncated` is True if a context shift has discarded
    tokens.

    `timings` exclude recording and compiling. The keys are prompt_n (computed prompt tokens), prompt_ms,
    prompt_tokens_per_second, decode_n, decode_ms, decode_tokens_per_second, n_reduces and reduce_us (mean
    host time of an all-reduce). If tokens were drafted, draft_n and draft_n_accepted count them. If the
    prompt has images: image_n, image_cache_n (images that were computed earlier), image_ms and its parts
    image_decode_ms, image_preprocess_ms and image_encode_ms. Rows of images have negative `prompt_tokens`.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    timings: dict[str, float]
    prompt_tokens: list[int]
    seed: int
    slot: int = 0
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    truncated: bool = False


def report(timings: Timings | None) -> dict[str, float]:
    """Return timings by their public names. A rate is 0 if its time is 0."""
    t = timings or Timings()
    raw = asdict(t)
    rates = {
        f"{part}_tokens_per_second": raw[f"{part}_n"] / raw[f"{part}_s"] if raw[f"{part}_s"] else 0.0
        for part in ("prompt", "decode")
    }
    drafts = {"draft_n": t.draft_n, "draft_n_accepted": t.draft_n_accepted} if t.draft_n else {}
    return {
        "prompt_n": t.prompt_n, "prompt_ms": 1e3 * t.prompt_s,
        "prompt_tokens_per_second": rates["prompt_tokens_per_second"],
        "decode_n": t.decode_n, "decode_ms": 1e3 * t.decode_s,
        "decode_tokens_per_second": rates["decode_tokens_per_second"],
        "n_reduces": t.n_reduces, "reduce_us": 1e6 * t.reduce_s / t.n_reduces if t.n_reduces else 0.0,
        **drafts,
    }  # fmt: skip


def total(reports: Sequence[dict[str, float]]) -> dict[str, float]:

    def summed(name: str) -> float:
        return sum(r.get(name, 0) for r in reports)

    images = {name: summed(name) for r in reports for name in r if name.startswith("image_")}
    return images | report(
        Timings(
            int(summed("prompt_n")), summed("prompt_ms") / 1e3, int(summed("decode_n")),
            summed("decode_ms") / 1e3, int(summed("n_reduces")),
            sum(r["reduce_us"] * r["n_reduces"] for r in reports) / 1e6,
            int(summed("draft_n")), int(summed("draft_n_accepted")),
        )
    )  # fmt: skip
