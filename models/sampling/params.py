"""Sampling parameters of a request. Names, order, meaning and defaults are as in llama.cpp. Only `min_tokens`
and `stop_token_ids` are from vLLM."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from vkbackend.checks import finite, items, plain, refused, switch, whole, whole_number
from vkbackend.options_class import check_fields, option

MAX_SEED = (1 << 64) - 1
MAX_TOKEN = (1 << 31) - 1
MAX_TOKENS = 1 << 31
MAX_LOGPROBS = 1024
ORDER = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
LETTERS = dict(zip("edskypmxt", ORDER, strict=True))  # letters of llama.cpp's --sampler-seq
BREAKERS = ("\n", ":", '"', "*")
_OTHER_NAMES = {
    "nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typical": "typ_p", "typical_p": "typ_p"
}  # fmt: skip


Processor = Callable[[list[int], np.ndarray], np.ndarray]


class SamplingKeywords(TypedDict, total=False):
    temperature: float
    """How random the choice is (default: 0.8). 0 takes the most likely token, on ties the lowest id."""
    dynatemp_range: float
    """Changes the temperature by how sure the model is, between temperature - dynatemp_range and temperature
    + dynatemp_range (default: 0.0, off)."""
    dynatemp_exponent: float
    """The exponent of the normalized entropy in dynamic temperature (default: 1.0)."""
    top_k: int
    """Keep that many of the most likely tokens (default: 40); 0 keeps all."""
    top_p: float
    """Keep the smallest set of tokens whose probabilities reach this sum (default: 0.95); 1 keeps all."""
    min_p: float
    """Keep tokens whose probability is at least this fraction of the best probability (default: 0.05); 0
    keeps all."""
    typical_p: float
    """Keep the tokens whose surprise is nearest to the expected one, up to this sum of probabilities
    (default: 1.0, which keeps all)."""
    top_n_sigma: float
    """Keep tokens whose logits are at most that many standard deviations below the best (default: -1.0, which
    keeps all; so does 0)."""
    xtc_probability: float
    """The chance that the most likely candidates are removed (default: 0.0): all whose probability is at
    least `xtc_threshold`, except the least likely of them."""
    xtc_threshold: float
    """See `xtc_probability` (default: 0.1); above 0.5 it is off."""
    repeat_penalty: float
    """Divides positive and multiplies negative logits of recent tokens (default: 1.0, which changes
    nothing)."""
    presence_penalty: float
    """Subtracted from the logit of each recent token (default: 0.0)."""
    frequency_penalty: float
    """Subtracted from the logit of each recent token, once for each occurrence (default: 0.0)."""
    repeat_last_n: int
    """How many recent tokens are penalized, the prompt included (default: 64); 0: none, -1: all."""
    dry_multiplier: float
    """DRY lowers the logits of tokens that would extend a repetition of n tokens, by multiplier * base ** (n
    - allowed length) (default: 0.0, off)."""
    dry_base: float
    """See `dry_multiplier` (default: 1.75); below 1 it is off."""
    dry_allowed_length: int
    """Repetitions of fewer tokens are not penalized (default: 2)."""
    dry_penalty_last_n: int
    """How many recent tokens DRY searches, including the prompt (default: -1, all); 0: none."""
    dry_sequence_breakers: Iterable[str | Sequence[int]]
    """Texts, or sequences of token ids, at which repetitions end (default: newline, colon, double quote,
    asterisk)."""
    mirostat: int
    """1 or 2: that version of Mirostat chooses among all tokens, after logit_bias and temperature, and
    replaces all other samplers (default: 0, none)."""
    mirostat_tau: float
    """The target of Mirostat's surprise, in bits (default: 5.0)."""
    mirostat_eta: float
    """How fast Mirostat adapts (default: 0.1)."""
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]]
    """Numbers that are added to logits, by token id; -inf forbids the token (default: none)."""
    samplers: str | Iterable[str]
    """The samplers in order, as "a;b" or a list; samplers that are not named are skipped (default:
    "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature")."""
    min_tokens: int
    """Forbid tokens that end the text until that many tokens are generated (default: 0)."""
    min_keep: int
    """How many candidates top_p, min_p, typ_p and xtc keep at least (default: 0, which is one)."""
    stop_token_ids: Iterable[int]
    """Tokens that end the text, in addition to the model's (default: none)."""
    logprobs: int | None
    """Return the log probability of each generated token, and of this many most likely tokens at its
    position: 0 to 1024. The log probabilities are from the model's logits before any sampler. None (default):
    no log probabilities."""
    post_sampling_probs: bool
    """True: `logprobs` are from the candidates that the samplers keep (default: False)."""
    logits_processors: Iterable[Processor]
    """Functions that take (tokens so far, float32 logits [n_vocab]) and return logits. They run in this
    order, before all samplers (default: none). They are slow, because each token copies a row of logits to
    the host, and all sequences wait for Python."""
    seed: int | None
    """Seed of the random numbers. None (default) or -1 draws a seed, which is then in `Completion.seed`."""


def _seed(name: str, value: Any) -> int:
    seed = -1 if value is None else whole_number(name, value, -1, MAX_SEED, " (-1 or None: a random one)")
    return secrets.randbits(32) if seed == -1 else seed


def _token(name: str, value: Any) -> int:
    return whole_number(name, value, 0, MAX_TOKEN, " (a token id)")


def _real(name: str, value: Any) -> float:
    return finite(-math.inf, math.inf)(name, value)


def _bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    expected = "expected {token id: bias} or pairs of them, such as {15043: -1.5, 2: -math.inf}"
    pairs = value.items() if isinstance(value, Mapping) else items(name, value, expected)
    biases = {}
    for pair in pairs:
        try:
            token, bias = pair
        except (TypeError, ValueError):
            raise refused(name, pair, expected) from None
        forbids = plain(bias) == -math.inf
        biases[_token(name, token)] = -math.inf if forbids else _real(name, bias)
    return tuple(biases.items())


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    return tuple(_token(name, token) for token in items(name, value, "expected token ids, such as [2]"))


def _samplers(name: str, value: Any) -> tuple[str, ...]:
    given = value.split(";") if isinstance(value, str) else items(name, value, "expected names of samplers")
    names = []
    for sampler in given:
        word = str(sampler).strip().lower().replace("-", "_")
        word = _OTHER_NAMES.get(word, word)
        if word == "":
            continue
        if word not in ORDER:
            raise refused(name, sampler, f"not a sampler; there are: {', '.join(ORDER)}")
        names.append(word)
    return tuple(names)


def _breakers(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
    expected = "expected a list of texts, or of token ids each"
    breakers: list[str | tuple[int, ...]] = []
    for item in items(name, value, expected):
        breaker = item if isinstance(item, str) else _tokens(name, item)
        if breaker and breaker != "none":
            breakers.append(breaker)
    return tuple(breakers)


def logprobs_count(name: str, value: Any) -> int | None:
    return None if value is None else whole_number(name, value, 0, MAX_LOGPROBS, " (None: none)")


def _processors(name: str, value: Any) -> tuple[Processor, ...]:
    given = tuple(items(name, value, "expected a list of functions of (tokens, logits)"))
    for function in given:
        if not callable(function):
            raise refused(name, function, "expected a function of (tokens, logits)")
    return given


def _sigma(name: str, value: Any) -> float:
    return max(-1.0, _real(name, value))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters, with llama.cpp's defaults. `SamplingKeywords` describes the fields. Raises
    InvalidArgument."""

    temperature: float = option(0.8, finite(0, math.inf, " (0: greedy)"))
    top_k: int = option(40, whole(0, 1 << 31, " (0: all tokens)"))
    top_p: float = option(0.95, finite(0, 1, " (1: all tokens)"))
    min_p: float = option(0.05, finite(0, 1, " (0: all tokens)"))
    repeat_penalty: float = option(1.0, finite(1e-6, math.inf, " (1: none)"))
    repeat_last_n: int = option(64, whole(-1, MAX_TOKENS, " (0: no penalty, -1: all tokens)"))
    seed: int | None = option(None, _seed)

    presence_penalty: float = option(0.0, _real)
    frequency_penalty: float = option(0.0, _real)
    dynatemp_range: float = option(0.0, finite(0, math.inf, " (0: off)"))
    dynatemp_exponent: float = option(1.0, finite(0, math.inf))
    typical_p: float = option(1.0, finite(0, 1, " (1: all tokens)"))
    top_n_sigma: float = option(-1.0, _sigma)
    xtc_probability: float = option(0.0, finite(0, 1, " (0: off)"))
    xtc_threshold: float = option(0.1, finite(0, 1, " (above 0.5: off)"))
    dry_multiplier: float = option(0.0, finite(0, math.inf, " (0: off)"))
    dry_base: float = option(1.75, finite(0, math.inf, " (below 1: off)"))
    dry_allowed_length: int = option(2, whole(0, MAX_TOKENS))
    dry_penalty_last_n: int = option(-1, whole(-1, MAX_TOKENS, " (0: off, -1: all tokens)"))
    dry_sequence_breakers: tuple[str | tuple[int, ...], ...] = option(BREAKERS, _breakers)
    mirostat: int = option(0, whole(0, 2, " (0: off)"))
    mirostat_tau: float = option(5.0, finite(0, math.inf))
    mirostat_eta: float = option(0.1, finite(0, math.inf))
    logit_bias: tuple[tuple[int, float], ...] = option((), _bias)
    samplers: tuple[str, ...] = option(ORDER, _samplers)
    min_tokens: int = option(0, whole(0, MAX_TOKENS))
    min_keep: int = option(0, whole(0, MAX_TOKENS))
    stop_token_ids: tuple[int, ...] = option((), _tokens)
    logprobs: int | None = option(None, logprobs_count)
    post_sampling_probs: bool = option(False, switch)
    logits_processors: tuple[Processor, ...] = option((), _processors)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def greedy(self) -> bool:
        heats = self.mirostat or "temperature" in self.samplers
        return bool(heats and self.temperature == 0 and (self.mirostat or not self.dynatemp_range))

    @property
    def penalizes(self) -> bool:
        changed = self.repeat_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return bool(changed and self.repeat_last_n)

    @property
    def dry(self) -> bool:
        return bool(self.dry_multiplier and self.dry_base >= 1 and self.dry_penalty_last_n)

    @property
    def chain(self) -> tuple[str, ...]:
        """Return the samplers that have an effect, in order. Greedy sampling needs no filters after the last
        penalty, because filters keep the best token."""
        if self.mirostat:
            return ("temperature",)
        works = {
            "penalties": self.penalizes, "dry": self.dry, "top_n_sigma": self.top_n_sigma > 0,
            "top_k": self.top_k > 0, "typ_p": self.typical_p < 1, "top_p": self.top_p < 1,
            "min_p": self.min_p > 0, "temperature": True,
            "xtc": self.xtc_probability > 0 and self.xtc_threshold <= 0.5,
        }  # fmt: skip
        names = [name for name in self.samplers if works[name]]
        if self.greedy and not {"typ_p", "xtc"} & set(names):
            n = max((i + 1 for i, name in enumerate(names) if name in ("penalties", "dry")), default=0)
            names = [*names[:n], "temperature"]
        return tuple(names)

    @property
    def n_decisive(self) -> int:
        """Return how many of the most likely tokens can be chosen, without counting lowered tokens. 0 means
        that any token can be chosen."""
        if self.logits_processors or self.mirostat or any(bias > 0 for _, bias in self.logit_bias):
            return 0
        lowers = self.repeat_penalty >= 1 and self.presence_penalty >= 0 and self.frequency_penalty >= 0
        for name in self.chain:
            if name == "top_k":
                return self.top_k
            if name == "temperature" and not self.dynatemp_range:
                if self.temperature == 0:
                    return 1
            elif name != "dry" and not (name == "penalties" and lowers):
                return 0
        return 0

    @property
    def n_candidates(self) -> int:
        """Return how many of the most likely tokens are enough for any history, or 0 for complete rows. The
        number is `n_decisive`, plus one for each token that `logit_bias` or `min_tokens` lowers."""
        if {"penalties", "dry"} & set(self.chain):
            return 0  # `Sampler.n_candidates` knows the lowered tokens
        lowered = {token for token, _ in self.logit_bias}
        if self.min_tokens:
            lowered.update(self.stop_token_ids)
        return self.n_decisive and self.n_decisive + len(lowered)
