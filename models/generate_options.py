"""The options of a generation.

The guide docs/guides/extending.md lists the steps to add an option.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from vkbackend.checks import finite, optional, switch, whole
from vkbackend.models.arguments import adapter_scales, stop_strings
from vkbackend.models.grammar.structure import Structure, grammar_text, schema_text, structure_of
from vkbackend.models.options import MAX_CONTEXT
from vkbackend.models.sampling.params import SamplingKeywords, SamplingParams, logprobs_count
from vkbackend.options_class import option

MAX_PRIORITY, MAX_DEADLINE_S = 1000, 1e7


class AnswerKeywords(SamplingKeywords, total=False):
    """The keywords of `Chat.send`."""

    stop: str | Sequence[str] | None
    """Strings that end the text and are not part of it. None (default): none."""
    ignore_eos: bool
    """True: forbid the model's end-of-text tokens, so that the text continues."""
    json_schema: str | bool | Mapping[str, Any] | type | None
    """The answer is JSON of this JSON Schema: its text, a dict, or a pydantic class. This keyword and the
    next four need the extra `grammar` (llguidance); a schema that llguidance does not support is an error.
    None (default): no schema."""
    json_object: bool
    """True: the answer is a JSON object."""
    regex: str | None
    """The complete answer matches this regular expression, in Rust's syntax. None (default): none."""
    lark: str | None
    """The answer follows this grammar, in llguidance's Lark syntax. None (default): none."""
    grammar: str | None
    """The answer follows this grammar in GBNF, llama.cpp's syntax. None (default): none."""


class GenerateKeywords(AnswerKeywords, total=False):
    """The keywords of `LLM.generate` and `LLM.stream`."""

    echo: bool
    """True: the text begins with the prompt."""
    prompt_logprobs: int | None
    """Like `logprobs`, for the tokens of the prompt, which is then computed completely. None (default): no
    log probabilities."""
    parse_special: bool
    """True (default): special tokens in a text, such as <|im_start|>, are parsed as special tokens."""
    cache_prompt: bool
    """False: compute the complete prompt, without cells of earlier requests (default: True)."""
    prompt_progress: bool
    """True: while the prompt is computed, yield chunks without text that have a `progress` (default:
    False)."""
    timings_per_token: bool
    """True: every chunk has timings, not only the last (default: False)."""
    slot: int | None
    """The slot to run in; the request waits until the slot is free. The slot's content is stored until
    another sequence needs the slot or its cells. None (default): the free slot that holds most of the prompt.
    `prefix_cache` describes what is not computed again."""
    n_keep: int | None
    """With `context_shift`: how many tokens of the prompt a shift keeps, besides BOS; -1 for the complete
    prompt. None (default): the model's `n_keep`, which is 0 by default."""
    n_discard: int
    """With `context_shift`: how many tokens a shift discards. 0 (default): half of the tokens that are not
    kept."""
    lora: Mapping[str | int, float] | Sequence[tuple[str | int, float]] | None
    """The adapters of this request and their scales, by name or number, such as {"sql": 0.5}; at most 4.
    Adapters that are not listed are not used, so {} means none. None (default): the model's default
    scales."""
    draft_max: int | None
    """How many tokens a draft has at most; 0: none are drafted. None (default): the model's `draft_max`,
    which is 7 by default."""
    priority: int
    """Which waiting request runs first: the lowest number (default: 0). Each unit counts as ten seconds of
    waiting, so no request waits for ever."""
    deadline_s: float | None
    """How many seconds the request may take, including waiting. After that it ends with DeadlineExceeded.
    None (default): no limit."""


@dataclass(frozen=True, slots=True)
class GenerateOptions(SamplingParams):
    """The checked options of a generation. Raises InvalidArgument."""

    stop: tuple[str, ...] = option((), stop_strings)
    ignore_eos: bool = option(False, switch)
    json_schema: str | None = option(None, schema_text)
    json_object: bool = option(False, switch)
    regex: str | None = option(None, grammar_text)
    lark: str | None = option(None, grammar_text)
    grammar: str | None = option(None, grammar_text)
    echo: bool = option(False, switch)
    prompt_logprobs: int | None = option(None, logprobs_count)
    parse_special: bool = option(True, switch)
    cache_prompt: bool = option(True, switch)
    prompt_progress: bool = option(False, switch)
    timings_per_token: bool = option(False, switch)
    slot: int | None = None  # checked by `LLM`, which knows n_slots
    n_keep: int | None = option(None, optional(whole(-1, MAX_CONTEXT, " (-1: the complete prompt)")))
    n_discard: int = option(0, whole(0, MAX_CONTEXT))
    lora: tuple[tuple[str | int, float], ...] | None = option(None, adapter_scales)
    draft_max: int | None = option(None, optional(whole(0, 1 << 16)))
    priority: int = option(0, whole(-MAX_PRIORITY, MAX_PRIORITY))
    deadline_s: float | None = option(None, optional(finite(0, MAX_DEADLINE_S)))

    @property
    def structure(self) -> Structure | None:
        """Return the schema or grammar of the answer. Raises InvalidArgument for several structures, and
        UnsupportedFeature without llguidance."""
        return structure_of(self.json_schema, self.json_object, self.regex, self.lark, self.grammar)

    @classmethod
    def of(cls, **options: Unpack[GenerateKeywords]) -> GenerateOptions:
        given: dict[str, Any] = {**options}
        return cls(**given)
