"""How the next token is chosen: the values that a request may give, their checks and defaults.

Names, order and meaning are those of llama.cpp's sampler chain.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Any, TypedDict

from vkbackend.checks import finite, whole, whole_number
from vkbackend.options import check_fields, option

MAX_SEED = (1 << 64) - 1


class SamplingKeywords(TypedDict, total=False):
    """What may be given for the fields of `SamplingParams`: how the next token is chosen."""

    temperature: float
    """How much chance decides (default: 0.8); 0 takes the most likely token, the lowest id on ties."""
    top_k: int
    """Candidates that are kept, the most likely ones (default: 40); 0 keeps all."""
    top_p: float
    """Keep the smallest set of tokens whose probabilities reach this sum (default: 0.95); 1 keeps all."""
    min_p: float
    """Keep tokens from this fraction of the best probability upwards (default: 0.05); 0 keeps all."""
    repeat_penalty: float
    """Divides positive and multiplies negative logits of recent tokens (default: 1.0, which changes
    nothing)."""
    repeat_last_n: int
    """How many recent tokens are penalized, the prompt included (default: 64); 0: none, -1: all."""
    seed: int | None
    """Seed of the random numbers. None (default) or -1 draws one, which `Completion.seed` tells."""


def _seed(name: str, value: Any) -> int:
    seed = -1 if value is None else whole_number(name, value, -1, MAX_SEED, " (-1 or None: a random one)")
    return secrets.randbits(32) if seed == -1 else seed


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; the defaults are those of llama.cpp's command line. `SamplingKeywords`
    describes the fields. Raises InvalidArgument.
    """

    temperature: float = option(0.8, finite(0, math.inf, " (0: greedy)"))
    top_k: int = option(40, whole(0, 1 << 31, " (0: all tokens)"))
    top_p: float = option(0.95, finite(0, 1, " (1: all tokens)"))
    min_p: float = option(0.05, finite(0, 1, " (0: all tokens)"))
    repeat_penalty: float = option(1.0, finite(1e-6, math.inf, " (1: none)"))
    repeat_last_n: int = option(64, whole(-1, 1 << 31, " (0: no penalty, -1: all tokens)"))
    seed: int | None = option(None, _seed)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def n_candidates(self) -> int:
        """How many of the likeliest tokens decide the choice; 0 where all of them may."""
        if self.repeat_penalty != 1 and self.repeat_last_n:
            return 0
        return 1 if self.temperature == 0 else self.top_k
