"""Merges characters by token scores, as SentencePiece does. Unknown characters become byte tokens.

The pair with the highest token score is merged first; on a tie the leftmost pair. BPE in the `tokenizers`
library cannot express this rule for ties, and listing all merges takes 0.2 s for 32,000 tokens.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from vkbackend.errors import GGUFError
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.vocabulary import SPACE, Scheme, Vocabulary, spell_spaced

_INNER_SPACES = re.compile(f"([^{SPACE}]){SPACE}+(?=(.?))", re.DOTALL)
_MAX_PAIRS = 64  # Maximum number of lookbehinds in a pattern; each takes 30 ns per word.
# The 16,384 words take 4 MB. On 2 MB of English, 65,536 words were no faster, and 8,192 were 10 % slower.
_CACHED_WORDS, _CACHED_CHARS = 1 << 14, 64


class SpmMerger:
    """`ids` maps token texts to ids, `scores` lists a score per id, and `byte_ids` the id of each byte."""

    def __init__(self, ids: Mapping[str, int], scores: Sequence[float], byte_ids: Sequence[int]) -> None:
        self._ids, self._scores, self._byte_ids = ids, scores, byte_ids
        self._words = re.compile(_word_pattern(ids)).findall
        self._cached = lru_cache(_CACHED_WORDS)(lambda word: tuple(self._merge(word)))

    def encode(self, text: str) -> list[int]:
        out: list[int] = []
        for word in self._words(text):
            out += self._cached(word) if len(word) <= _CACHED_CHARS else self._merge(word)
        return out

    def _merge(self, word: str) -> list[int]:
        """Merge a word in O(n log n) steps. Outdated pairs remain in the heap and are skipped."""
        ids, scores = self._ids, self._scores
        symbols, n = list(word), len(word)
        after, before = list(range(1, n + 1)), list(range(-1, n - 1))
        heap: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            text = symbols[left] + symbols[right]
            if (token := ids.get(text)) is not None:
                heapq.heappush(heap, (-scores[token], left, right, text))

        for i in range(n - 1):
            offer(i, i + 1)
        while heap:
            _, left, right, text = heapq.heappop(heap)
            if after[left] != right or symbols[left] + symbols[right] != text:
                continue
            symbols[left], symbols[right] = text, ""
            after[left], after[right] = after[right], -1
            if after[left] < n:
                before[after[left]] = left
                offer(left, after[left])
            if before[left] >= 0:
                offer(before[left], left)

        out: list[int] = []
        for symbol in filter(None, symbols):
            token = ids.get(symbol)
            out += (token,) if token is not None else [self._byte_ids[b] for b in symbol.encode()]
        return out


def _word_pattern(texts: Iterable[str]) -> str:
    """Return a pattern of words that can be merged separately. The pattern splits text before a run of
    spaces, unless a token with inner spaces may match there. Such a token matches the text's character before
    the spaces. After the spaces, the token ends or matches the text's next character. Gemma has a few tokens
    with inner spaces."""
    around: dict[str, set[str]] = {}
    for text in texts:
        if SPACE in text[1:]:
            for before, follower in _INNER_SPACES.findall(text):
                around.setdefault(before, set()).add(follower)
    if len(around) > _MAX_PAIRS:
        around = {"".join(around): set().union(*around.values())}
    glue = "|".join(
        f"(?<=[{re.escape(before)}]){SPACE}+" + ("" if "" in follower else f"(?=[{_escaped(follower)}])")
        for before, follower in sorted(around.items())
    )
    more = f"(?:(?:{glue})[^{SPACE}]*)*" if glue else ""
    return f"{SPACE}*[^{SPACE}]+{more}|{SPACE}+"


def _escaped(characters: Iterable[str]) -> str:
    return "".join(map(re.escape, sorted(characters)))


def spm(gguf: GGUF, vocabulary: Vocabulary) -> Scheme:
    scores = gguf.floats("tokenizer.ggml.scores").tolist()
    vocabulary.check_length("scores", len(scores))
    if any(map(math.isnan, scores)):
        raise GGUFError(f"{vocabulary.path}: 'tokenizer.ggml.scores' holds NaN")
    byte_ids = vocabulary.byte_ids(vocabulary.named("unknown", 0))
    merger = SpmMerger(vocabulary.ids, scores, byte_ids)
    return Scheme(
        lambda text: merger.encode(text.replace(" ", SPACE)),
        spell_spaced,
        add_bos=vocabulary.flag("add_bos_token", True),
        add_eos=vocabulary.flag("add_eos_token", False),
        add_space_prefix=vocabulary.flag("add_space_prefix", True),
        bos=vocabulary.named("bos", 1),
        eos=vocabulary.named("eos", 2),
    )
