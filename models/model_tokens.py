"""Adds the model's end tokens, suppressed tokens and DRY breakers to sampling options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from vkbackend.errors import GGUFError, InvalidArgument, UnsupportedModel
from vkbackend.models.generate_options import GenerateOptions
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.grammar.compiler import Vocabulary
from vkbackend.models.sampling.breakers import breaker_tokens
from vkbackend.models.sampling.params import BREAKERS
from vkbackend.models.text.tokenizer import Tokenizer

Breaker = str | tuple[int, ...]


def suppressed_ids(gguf: GGUF) -> frozenset[int]:
    """Return the tokens that the model must never write (in Gemma 4 Unified and MiniMax)."""
    with suppress(GGUFError):
        return frozenset(int(token) for token in gguf.ints("tokenizer.ggml.suppress_tokens", ()))
    return frozenset()


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Control tokens have no text in the returned vocabulary."""
    pieces = tuple(tokenizer.piece(token) for token in range(tokenizer.n_vocab))
    special = (i for i, piece in enumerate(pieces) if not piece or tokenizer.is_special(i))
    return Vocabulary(pieces, tuple(special), tuple(sorted(tokenizer.stop_ids)))


class ModelTokens:
    def __init__(
        self, stop_ids: frozenset[int], suppressed: frozenset[int], tokenizer: Tokenizer | None
    ) -> None:
        self._stop_ids, self._suppressed, self.tokenizer = stop_ids, suppressed, tokenizer
        self._known: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}

    def resolved(self, options: GenerateOptions, n_vocab: int) -> GenerateOptions:
        """Return `options` with the model's end tokens in `stop_token_ids`. If `ignore_eos` is set,
        `logit_bias` forbids the end tokens instead. Suppressed tokens are always forbidden."""
        named = [*options.stop_token_ids, *(token for token, _ in options.logit_bias)]
        if outside := [token for token in named if token >= n_vocab]:
            raise InvalidArgument(
                f"token id {outside[0]} (logit_bias, stop_token_ids) is out of range: the model has ids "
                f"0..{n_vocab - 1}"
            )
        ends, forbidden = set(options.stop_token_ids), set(self._suppressed)
        if options.ignore_eos:
            forbidden |= self._stop_ids - ends
        else:
            ends |= self._stop_ids
        bias = dict(options.logit_bias) | dict.fromkeys(sorted(forbidden), -math.inf)
        return replace(
            options,
            logit_bias=tuple((token, value) for token, value in bias.items() if token < n_vocab),
            stop_token_ids=tuple(sorted(ends)),
            dry_sequence_breakers=self._breakers(options.dry_sequence_breakers) if options.dry else (),
        )

    def _breakers(self, breakers: Sequence[Breaker]) -> tuple[tuple[int, ...], ...]:
        """Without a tokenizer, default breakers are dropped, and other breakers raise UnsupportedModel."""
        texts = tuple(breaker for breaker in breakers if isinstance(breaker, str))
        sequences = tuple(breaker for breaker in breakers if not isinstance(breaker, str))
        tokenizer = self.tokenizer
        if tokenizer is None:
            if texts and texts != BREAKERS:
                raise UnsupportedModel(
                    f"dry_sequence_breakers={list(texts)}: the model has no usable tokenizer; give sequences "
                    "of token ids"
                )
            return sequences
        if texts not in self._known:  # takes 0.3 s for 152k tokens
            pieces = [tokenizer.piece(token) for token in range(tokenizer.n_vocab)]
            self._known[texts] = breaker_tokens(
                texts, pieces, lambda text: tokenizer.encode(text, add_special=False)
            )
        return (*self._known[texts], *sequences)
