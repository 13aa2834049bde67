"""Convert the fields of a request to generation options."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vkbackend.checks import finite_number, refused, whole_number
from vkbackend.errors import InvalidArgument
from vkbackend.models.grammar.structure import KEYWORDS
from vkbackend.models.sampling.params import LETTERS, MAX_SEED
from vkbackend.tools.server.body import Fields
from vkbackend.tools.server.limits import Limits

# The engine gets these fields unchanged and checks their values.
SAME = (
    "top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold",
    "dynatemp_range", "dynatemp_exponent", "repeat_penalty", "repeat_last_n", "presence_penalty",
    "frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "mirostat", "mirostat_tau", "mirostat_eta", "samplers", "min_tokens", "min_keep", "ignore_eos",
    "post_sampling_probs",
)  # fmt: skip
MAX_SAMPLERS = 32
MAX_BIAS_TEXT = 16_384  # Tokenizing this many characters takes 10 ms.
Tokenize = Callable[[str], list[int]]


def sampling_of(
    fields: Fields, defaults: Mapping[str, Any], limits: Limits, tokenize: Tokenize
) -> dict[str, Any]:
    """Return the keyword arguments of `LLM.astream`. `defaults` are from the command line. Raises
    InvalidArgument."""
    options = dict(defaults)
    for name in SAME:
        if (value := fields.get(name)) is not None:
            options[name] = value
    if type(options.get("top_k")) is int:
        options["top_k"] = max(0, options["top_k"])  # -1 is the same as 0: all tokens
    if isinstance(letters := fields.get("samplers"), str) and set(letters) <= set(LETTERS):
        options["samplers"] = [LETTERS[letter] for letter in letters]  # as in llama-server
    if isinstance(options.get("samplers"), list) and len(options["samplers"]) > MAX_SAMPLERS:
        raise refused("samplers", len(options["samplers"]), f"at most {MAX_SAMPLERS} may be given")
    if (temperature := fields.number("temperature", -math.inf, math.inf, None)) is not None:
        options["temperature"] = max(0.0, temperature)  # negative is greedy
    if fields.has("seed"):
        options["seed"] = fields.whole("seed", -1, MAX_SEED, None)
    if fields.has("logit_bias"):
        options["logit_bias"] = bias_of(fields.get("logit_bias"), limits, tokenize)
    for name in ("dry_sequence_breakers", "stop"):
        if (value := fields.get(name)) not in (None, []):
            options[name] = texts_of(name, value, limits)
    if fields.get("dry_sequence_breakers") == []:
        raise refused(
            "dry_sequence_breakers", [], "expected at least one string; dry_multiplier 0 turns DRY off"
        )
    if (structure := structure_of(fields)) is not None:
        options = {name: value for name, value in options.items() if name not in KEYWORDS} | structure
    if (ids := fields.get("stop_token_ids")) is not None:
        options["stop_token_ids"] = _list("stop_token_ids", ids, limits.stops)
    return options


def structure_of(fields: Fields) -> dict[str, Any] | None:
    """Return the structure of OpenAI's `response_format`, or of llama-server's `json_schema` or `grammar`. {}
    means free text, and None means that these fields are missing."""
    given = {
        name: fields.get(name) for name in ("json_schema", "grammar") if fields.get(name) not in (None, "")
    }
    form = fields.inner("response_format")
    if form is None:
        return given or None
    form.required("type")
    kind = form.word("type", ("text", "json_object", "json_schema"), "text")
    if kind == "text":
        return given
    if given:
        raise refused("response_format", kind, f"it cannot be combined with {', '.join(given)}")
    schema = form.get("schema")  # as in llama-server
    if kind == "json_schema" and schema is None:
        inner = form.inner("json_schema")
        if inner is None or inner.get("schema") is None:
            raise InvalidArgument(
                "response_format.json_schema.schema is missing", argument="response_format.json_schema"
            )
        schema = inner.get("schema")
    return {"json_object": True} if schema is None else {"json_schema": schema}


def texts_of(name: str, value: Any, limits: Limits) -> list[str]:
    expected = "expected a non-empty string or a list of them"
    texts = [value] if isinstance(value, str) else _list(name, value, limits.stops, expected)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise refused(name, value, expected)
        if len(text) > limits.stop_length:
            raise refused(name, text, f"at most {limits.stop_length} characters are allowed")
    return texts


def bias_of(value: Any, limits: Limits, tokenize: Tokenize) -> list[tuple[int, float]]:
    """Return pairs (token, bias) from {"id or text": bias} or [[id or text, bias or false], ...]."""
    expected = "expected {token id: bias} or [[token id or text, bias or false], ...]"
    pairs = list(value.items()) if isinstance(value, dict) else value
    biases: dict[int, float] = {}
    n_left = MAX_BIAS_TEXT
    for pair in _list("logit_bias", pairs, limits.biases, expected):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise refused("logit_bias", pair, expected)
        token, bias = pair
        number = -math.inf if bias is False else finite_number("logit_bias", bias, -1e9, 1e9)
        if isinstance(token, str) and token.isdecimal() and token.isascii() and len(token) < 20:
            token = int(token)
        if isinstance(token, str):
            n_left -= len(token)
            if n_left < 0:
                raise refused(
                    "logit_bias", token, f"the texts have more than {MAX_BIAS_TEXT} characters in total"
                )
            biases.update(dict.fromkeys(tokenize(token), number))
        else:
            biases[whole_number("logit_bias", token, 0, (1 << 31) - 1, " (a token id)")] = number
    return list(biases.items())


def _list(name: str, value: Any, most: int, expected: str = "expected a list") -> list[Any]:
    if not isinstance(value, list):
        raise refused(name, value, expected)
    if len(value) > most:
        raise InvalidArgument(f"{name} has {len(value)} entries, at most {most} are allowed", argument=name)
    return value
