"""RWKV's tokenizer (`tokenizer.ggml.model` "rwkv"), which chooses the longest token in bytes at each
position. A token may be part of a character, so files write tokens with escapes (`\\n`, `\\x80`).
"""

from __future__ import annotations

import re

from vkbackend.errors import GGUFError
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.token_roles import TokenType
from vkbackend.models.text.vocabulary import Scheme, Vocabulary

_ESCAPE = re.compile(rb"\\(x[0-9a-f]{2}|.)", re.DOTALL)
_NAMED = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


def rwkv(gguf: GGUF, vocabulary: Vocabulary) -> Scheme:
    ids: dict[bytes, int] = {}
    for text, i in vocabulary.ids.items():
        if vocabulary.types[i] in (TokenType.NORMAL, TokenType.BYTE):
            ids.setdefault(spell(text), i)
    if missing := [b for b in range(256) if bytes([b]) not in ids]:
        raise GGUFError(f"{vocabulary.path}: the vocabulary has no token for the byte {missing[0]:#04x}")
    matcher = _Longest(ids)
    return Scheme(
        lambda text: matcher.encode(text.encode()),
        spell,
        bos=vocabulary.named("bos"),
        eos=vocabulary.named("eos"),
    )


def spell(text: str) -> bytes:
    return _ESCAPE.sub(_unescaped, text.encode())


def _unescaped(match: re.Match[bytes]) -> bytes:
    escape = match[1]
    return bytes([int(escape[1:], 16)]) if len(escape) == 3 else _NAMED.get(escape, escape)


class _Longest:
    """The next two bytes of the text select which token lengths to try, longest first."""

    def __init__(self, ids: dict[bytes, int]) -> None:
        self._ids = ids
        lengths: dict[bytes, set[int]] = {}
        for token in ids:
            lengths.setdefault(token[:2], set()).add(len(token))
        self._lengths = {start: sorted(sizes, reverse=True) for start, sizes in lengths.items()}

    def encode(self, raw: bytes) -> list[int]:
        ids, lengths = self._ids, self._lengths
        out, at = list[int](), 0
        while at < len(raw):
            for n in lengths.get(raw[at : at + 2], ()):
                if (token := ids.get(raw[at : at + n])) is not None:
                    break
            else:
                n, token = 1, ids[raw[at : at + 1]]
            out.append(token)
            at += n
        return out
