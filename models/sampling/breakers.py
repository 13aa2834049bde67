"""Converts DRY's sequence breakers to tokens. A breaker is a text that ends a repetition. As in llama.cpp
(src/llama-sampler.cpp), the text may be inside one token, or span several tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from vkbackend.models.sampling.penalties import MAX_TAIL

MAX_BYTES = 40  # longer texts are truncated


def breaker_tokens(
    texts: Iterable[str], pieces: Sequence[bytes], encode: Callable[[str], list[int]]
) -> tuple[tuple[int, ...], ...]:
    """Return the breakers' tokens. `pieces` holds the bytes of each token. `encode` tokenizes without special
    tokens."""
    breakers: dict[tuple[int, ...], None] = {}
    for text in texts:
        raw = text.encode()[:MAX_BYTES]
        tails: dict[int, tuple[int, ...]] = {}
        for token, piece in enumerate(pieces):
            if raw in piece:
                breakers[(token,)] = None
                continue
            for held in range(1, min(len(raw), len(piece) + 1)):
                if piece.endswith(raw[:held]):
                    if held not in tails:
                        rest = raw[held:].decode(errors="ignore")
                        tails[held] = tuple(encode(rest)[:MAX_TAIL])
                    breakers[(token, *tails[held])] = None
    return tuple(breakers)
