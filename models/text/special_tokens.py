"""Extracts special tokens from a text before the other text is merged.

In llama.cpp the longest token (in bytes; on a tie the lower id) is extracted from the complete text, then the
second longest, in tokens x characters steps. This module returns the same tokens, but takes O(log tokens)
steps per position. `_settle` selects overlapping tokens by rank (length, then id).
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator

from vkbackend.models.text.prefix import n_common

MAX_LENGTH = 1024  # Characters. Published vocabularies have runs of up to 256 spaces or dashes.


def _escaped(characters: Iterable[str]) -> str:
    return "".join(map(re.escape, sorted(characters)))


class SpecialTokens:
    """`tokens` lists pairs of text and id, with distinct texts of 1 to MAX_LENGTH characters."""

    def __init__(self, tokens: Iterable[tuple[str, int]]) -> None:
        ids = dict(tokens)
        # Find the last token that sorts before a text or equals it. Each token that is a prefix of the text
        # is this token or a prefix of it. Index 0 means no token.
        texts = self._texts = ["", *sorted(ids)]
        self._ids = [-1, *(ids[text] for text in texts[1:])]
        self._by_rank = sorted(range(1, len(texts)), key=lambda i: (-len(texts[i].encode()), self._ids[i]))
        self._rank = [0] * len(texts)
        self._best = dict[str, int]()  # first character -> best rank
        for rank, i in enumerate(self._by_rank):
            self._rank[i] = rank
            self._best.setdefault(texts[i][0], rank)
        self._longest = max(map(len, texts))
        # If tokens begin with letters, the lookahead for a second character excludes most positions. The
        # pattern reads `_ahead` characters after the first.
        seconds = {text[1:2] for text in ids}
        self._ahead = 0 if "" in seconds else 1
        lookahead = f"(?=[{_escaped(seconds)}])" if self._ahead else ""
        self._begin = re.compile(f"[{_escaped(self._best)}]{lookahead}") if ids else None
        self._link()

    def _link(self) -> None:
        """Link every token to its longest proper prefix that is a token (`_prefix`). A second link, to a
        shorter prefix (`_jump`), reduces a search to O(log length) steps (Myers 1983)."""
        self._prefix, self._jump, depth = [0], [0], [0]
        for text in self._texts[1:]:
            i = len(self._prefix) - 1
            while not text.startswith(self._texts[i]):
                i = self._prefix[i]
            near, far = self._jump[i], self._jump[self._jump[i]]
            self._prefix.append(i)
            self._jump.append(far if depth[i] - depth[near] == depth[near] - depth[far] else i)
            depth.append(depth[i] + 1)

    def cut(self, text: str) -> list[str | int]:
        out: list[str | int] = []
        done = 0
        for at, i in self._find(text):
            out += (text[done:at], self._ids[i]) if done < at else (self._ids[i],)
            done = at + len(self._texts[i])
        return [*out, text[done:]] if done < len(text) else out

    def places(self, text: str) -> list[tuple[int, int]]:
        return [(at, at + len(self._texts[i])) for at, i in self._find(text)]

    def _find(self, text: str) -> Iterator[tuple[int, int]]:
        at = 0
        while self._begin and (match := self._begin.search(text, at)):
            at = match.start()
            if not (i := self._fitting(text, at, len(text))):
                at += 1
            elif self._yields(text, at, i):
                taken, at = self._settle(text, at)
                yield from taken
            else:
                yield at, i
                at += len(self._texts[i])

    def _fitting(self, text: str, at: int, end: int) -> int:
        """Return the longest token that begins at `at` and ends at or before `end`, or 0."""
        part = text[at : min(end, at + self._longest)]
        i = bisect_right(self._texts, part) - 1
        if part.startswith(self._texts[i]):
            return i
        if not self._prefix[i]:
            return 0
        n = n_common(part, self._texts[i])
        while len(self._texts[i]) > n:
            i = self._jump[i] if len(self._texts[self._jump[i]]) > n else self._prefix[i]
        return i

    def _yields(self, text: str, at: int, i: int) -> bool:
        """Return whether a token of better rank begins inside token `i`, which begins at `at`."""
        assert self._begin
        rank = self._rank[i]
        for match in self._begin.finditer(text, at + 1, at + len(self._texts[i]) + self._ahead):
            if self._best[match[0]] < rank and (other := self._fitting(text, match.start(), len(text))):
                if self._rank[other] < rank:
                    return True
        return False

    def _settle(self, text: str, begin: int) -> tuple[list[tuple[int, int]], int]:
        """Select the tokens from `begin` to the first position that no token crosses. Return the tokens and
        the end position.

        A position's first candidate is its longest token. The candidate of best rank is selected first. If a
        candidate overlaps a selected token, the position's longest token that fits replaces it. A candidate
        is longer than the next two candidates of its position together, so a position has O(log length)
        candidates.
        """
        assert self._begin
        n, end, offers = len(text), begin + 1, list[int]()
        for match in self._begin.finditer(text, begin):
            if (at := match.start()) >= end:
                break
            if i := self._fitting(text, at, n):
                offers.append(self._rank[i] * n + at)
                end = max(end, at + len(self._texts[i]))
        heapq.heapify(offers)
        covered, taken = bytearray(end - begin), list[tuple[int, int]]()
        while offers:
            rank, at = divmod(heapq.heappop(offers), n)
            i = self._by_rank[rank]
            size = len(self._texts[i])
            first = at - begin
            blocked = covered.find(1, first, first + size)
            if blocked < 0:
                covered[first : first + size] = bytes([1]) * size
                taken.append((at, i))
            elif blocked > first and (i := self._fitting(text, at, begin + blocked)):
                heapq.heappush(offers, self._rank[i] * n + at)
        return sorted(taken), end
