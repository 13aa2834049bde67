"""llama-server's form of results: /completion's answer, its settings and probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from vkbackend.models.engine.cache.image_spans import without_images
from vkbackend.models.engine.completion import Chunk
from vkbackend.models.engine.messages import PromptProgress
from vkbackend.models.llm import LLM
from vkbackend.models.pictures import MediaPrompt
from vkbackend.models.sampling.logprobs import Logprobs
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.tools.server.generations import Job, Tally, stop_met, timings_of
from vkbackend.tools.server.llama_fields import LlamaFields
from vkbackend.tools.server.service import Service

_PARAMS = set(SamplingParams.__dataclass_fields__)
_OWN = ("logits_processors", "stop_token_ids", "min_tokens", "logprobs", "logit_bias", "seed")
LEAST = -3.4028234663852886e38  # llama-server writes this number for the logarithm of 0


def settings_of(options: Mapping[str, Any], max_tokens: int | None) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if name in _PARAMS and name != "seed"}
    params = asdict(SamplingParams(**given))
    n = -1 if max_tokens is None else max_tokens
    return {
        "seed": options.get("seed", -1),
        **{name: value for name, value in params.items() if name not in _OWN},
        "stop": list(options.get("stop", ())),
        "max_tokens": n,
        "n_predict": n,
        "n_probs": options.get("logprobs") or 0,
        "ignore_eos": bool(options.get("ignore_eos")),
        "grammar": options.get("grammar") or "",
        "timings_per_token": bool(options.get("timings_per_token")),
        "lora": [{"id": number, "scale": scale} for number, scale in options.get("lora", ())],
    }


def progress_of(progress: PromptProgress) -> dict[str, int]:
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": int(1e3 * progress.seconds),
    }


class LlamaResults:
    def __init__(self, service: Service, llm: LLM, fields: LlamaFields) -> None:
        self.service, self.llm, self.fields = service, llm, fields

    def part(self, job: Job, chunk: Chunk, tally: Tally) -> dict[str, Any]:
        part: dict[str, Any] = {
            "index": job.index,
            "content": chunk.text,
            "tokens": [] if chunk.token is None else [chunk.token],
            "stop": False,
            "id_slot": chunk.slot,
            "tokens_predicted": tally.n_tokens,
            "tokens_evaluated": tally.prompt_n,
        }
        if chunk.logprobs and chunk.token is not None:
            part["completion_probabilities"] = [self.row(job, chunk.token, chunk.logprobs)]
        return part | self.extras(chunk, tally)

    def extras(self, chunk: Chunk, tally: Tally) -> dict[str, Any]:
        """Return the fields that events of all APIs share: `timings` and `prompt_progress`."""
        extras: dict[str, Any] = {}
        if self.fields.times_tokens and chunk.token is not None:
            extras["timings"] = timings_of(tally)
        if chunk.progress is not None:
            extras["prompt_progress"] = progress_of(chunk.progress)
        return extras

    def whole(self, job: Job, tally: Tally, content: str, tokens: list[int]) -> dict[str, Any]:
        kind, word = self._end(job, tally)
        text = "".join(tally.text)
        return {
            "index": job.index,
            "content": content,
            "tokens": tokens,
            "id_slot": tally.slot,
            "stop": True,
            "model": self.service.config.alias,
            "tokens_predicted": tally.n_tokens,
            "tokens_evaluated": tally.prompt_n,
            "generation_settings": self.settings(job),
            "prompt": self._prompt(job),
            "has_new_line": "\n" in text,
            "truncated": tally.n_discarded > 0 or (kind == "limit" and self._is_full(job, tally)),
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": tally.prompt_n + max(0, tally.n_tokens - 1) - tally.n_discarded,
            "timings": timings_of(tally),
        }

    def _prompt(self, job: Job) -> str:
        if isinstance(job.ids, MediaPrompt):
            return job.text or ""
        # `LLM.detokenize` cannot be used, because the engine that began the answer may be lost.
        return self.llm.tokenizer.decode(without_images(job.ids), skip_special=False)

    def _is_full(self, job: Job, tally: Tally) -> bool:
        return tally.n_tokens != job.max_tokens and tally.prompt_n + tally.n_tokens >= self.llm.n_ctx

    def verbose(self, job: Job, tally: Tally) -> dict[str, Any]:
        if not self.fields.is_verbose:
            return {}
        text, tokens = ("", []) if self.fields.streams else ("".join(tally.text), tally.tokens)
        shown = tokens if self.fields.returns_tokens else []
        return {"__verbose": self.fitted(self.whole(job, tally, text, shown))}

    def settings(self, job: Job) -> dict[str, Any]:
        fields = self.fields
        biases = list(job.options.get("logit_bias", ()))
        if job.options.get("ignore_eos"):
            biases += [(token, -math.inf) for token in sorted(self.llm.tokenizer.stop_ids)]
        return settings_of(job.options, job.max_tokens) | {
            "n_keep": fields.n_keep,
            "n_discard": fields.n_discard,
            "stream": fields.streams,
            "n_ctx": self.llm.n_ctx,
            # JSON has no infinity, so llama-server writes null.
            "logit_bias": [
                {"bias": None if math.isinf(bias) else bias, "token": token} for token, bias in biases
            ],
        }

    def _end(self, job: Job, tally: Tally) -> tuple[str, str]:
        if tally.finish_reason == "length":
            return "limit", ""
        word = stop_met(self.llm, tally, "".join(tally.text), job.options.get("stop", ()))
        return ("word", word) if word else ("eos", "")

    def row(self, job: Job, token: int, row: Logprobs) -> dict[str, Any]:
        """Return the log probabilities of a token and the likeliest tokens. With `post_sampling_probs`,
        return probabilities."""
        is_plain = bool(job.options.get("post_sampling_probs"))
        top = [self._prob(t, p, is_plain) for t, p in row.top]
        return self._prob(token, row.logprob, is_plain) | {"top_probs" if is_plain else "top_logprobs": top}

    def _prob(self, token: int, logprob: float, is_plain: bool) -> dict[str, Any]:
        piece = self.llm.tokenizer.piece(token)
        value = {"prob": math.exp(logprob)} if is_plain else {"logprob": max(logprob, LEAST)}
        return {"id": token, "token": piece.decode("utf-8", "replace"), "bytes": list(piece)} | value

    def fitted(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return only the requested fields. A path "a/b" becomes the field b of the result."""
        if not self.fields.response_fields:
            return result
        fitted: dict[str, Any] = {}
        for path in self.fields.response_fields:
            value: Any = result
            *_, name = parts = str(path).split("/")
            for part in parts:
                value = value.get(part, KeyError) if isinstance(value, Mapping) else KeyError
            if value is not KeyError:
                fitted[name] = value
        return fitted
