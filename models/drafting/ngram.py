"""Drafts from the sequence's text: finds the latest earlier occurrence of the last tokens, and drafts the
tokens that follow it.

This is prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding). The conversation
is part of the prompt, so repeated answers and edited texts are guessed as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkbackend.models.drafting.drafter import NO_DRAFT, Draft, Want

# How many of the last tokens are searched for, longest first. On 40 edited files, with 4 rows per step,
# lengths 6, 4, 3 produced 3.28 tokens per step, and lengths 4, 3, 2 produced 3.12. More tokens match too
# rarely.
LENGTHS = (6, 4, 3)
MAX_BITS = 17
FEW = 16  # For fewer new tokens, a Python loop is faster than numpy.
FACTOR = 0x9E3779B97F4A7C15  # 2 ** 64 divided by the golden ratio.
MASK = (1 << 64) - 1


class Ngrams:
    """Draws drafts from tables with 3 * 4 * 2 ** bits bytes per slot, which are allocated once."""

    stores = False
    source, seconds, spent_s = "ngram", 0.0, 0.0  # A draft takes about 20 us; no model runs.

    def __init__(self, n_slots: int, n_ctx: int) -> None:
        bits = min(MAX_BITS, max(8, n_ctx.bit_length() + 1))
        self._texts = [_Text(bits) for _ in range(n_slots)]

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        drafts: list[Draft] = []
        for want in wants:
            text = self._texts[want.slot]
            text.read(want.number, want.history)
            drafts.append(text.draft(want.history, want.n))
        return drafts

    def source_of(self, want: Want) -> str:
        return self.source

    def owed(self, wants: Sequence[Want]) -> float:
        return 0.0

    def measure(self) -> bool:
        return False

    def took(self, slot: int, n_accepted: int) -> None:
        """Nothing is learned here."""

    def close(self) -> None:
        """Do nothing, because the tables are in host memory."""


class _Text:
    """For each length, a hash table maps an ngram to the position after its last occurrence, or to 0."""

    def __init__(self, bits: int) -> None:
        self._shift = 64 - bits
        self._tables = np.zeros((len(LENGTHS), 1 << bits), np.int32)
        self._views = [table.data for table in self._tables]  # faster for single entries
        self._number, self._n_read = -1, 0
        self._last: tuple[int, list[int]] = (-1, [])  # the last draft's end, and the table indices there

    def read(self, number: int, history: Sequence[int]) -> None:
        """Store the ngrams that have a next token. The ngrams that end with the last token have none."""
        if number != self._number:
            self._tables[:] = 0
            self._number, self._n_read = number, 0
            self._last = -1, []
        first, end = self._n_read, len(history)
        if end - first > FEW:
            begin = max(0, first - LENGTHS[0])
            tokens = np.array(history[begin:end], np.uint64)
            ends = np.arange(first, end)
            hashes = np.zeros(len(ends), np.uint64)
            for n in range(1, LENGTHS[0] + 1):
                if n > first:  # the first ngram of n tokens ends at position n
                    ends, hashes = ends[ends >= n], hashes[ends >= n]
                hashes = (hashes + tokens[ends - n - begin]) * np.uint64(FACTOR)
                if n in LENGTHS:
                    self._tables[LENGTHS.index(n), hashes >> np.uint64(self._shift)] = ends
        else:
            known_at, known = self._last
            for at in range(first, end):
                places = known if at == known_at else self._places(history, at)
                for view, place in zip(self._views[len(LENGTHS) - len(places) :], places, strict=True):
                    view[place] = at
        self._n_read = end

    def draft(self, history: Sequence[int], n_max: int) -> Draft:
        end = len(history)
        places = self._places(history, end)
        self._last = end, places
        for i, place in enumerate(places, len(LENGTHS) - len(places)):
            if at := self._views[i][place]:
                n = LENGTHS[i]
                if history[at - n : at] == history[end - n :]:
                    tokens = list(history[at : at + n_max])
                    while len(tokens) < n_max:  # The text repeats itself.
                        tokens += tokens[: n_max - len(tokens)]
                    return Draft(tokens, f"ngram-{n}")
        return NO_DRAFT

    def _places(self, history: Sequence[int], end: int) -> list[int]:
        """Return the table indices of the ngrams that end before position `end`, longest first. A hash begins
        with the last token, so that one pass hashes all lengths. A short text has no long ngrams."""
        value, places = 0, list[int]()
        for n, token in enumerate(history[max(0, end - LENGTHS[0]) : end][::-1], 1):
            value = (value + token) * FACTOR & MASK
            if n in LENGTHS:
                places.append(value >> self._shift)
        places.reverse()
        return places
