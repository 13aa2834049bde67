"""BPE with ranked merges, run by the `tokenizers` library. Most vocabularies merge the bytes of a
pre-tokenizer's words. Gemma 4 merges characters of lines. "whitespace" vocabularies (`tokenizer.ggml.model`)
merge characters of words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.pre_tokenizers import LINE_TOKENIZERS, PRE_TOKENIZERS, LineTokenizer
from vkbackend.models.text.vocabulary import SPACE, Scheme, Vocabulary, spell_spaced

_LINES = re.compile(r"[^\n]+|\n+")
_WORDS = re.compile(f"{SPACE}?[^{SPACE}]+|{SPACE}")


def _byte_characters() -> dict[str, int]:
    """Map the characters of byte-level BPE to bytes. Printable Latin-1 is unchanged; other bytes begin at
    U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(rest)}


_BYTE_OF = _byte_characters()


def _spell_bytes(text: str) -> bytes:
    # Some vocabularies add normal tokens outside the byte alphabet.
    return b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in text)


def bpe(gguf: GGUF, vocabulary: Vocabulary) -> Scheme:
    name = gguf.string("tokenizer.ggml.pre", "default")
    if (lines := LINE_TOKENIZERS.get(name)) is not None:
        return _line_bpe(gguf, vocabulary, lines)
    if (pre := PRE_TOKENIZERS.get(name)) is None:
        known = ", ".join(sorted({*PRE_TOKENIZERS, *LINE_TOKENIZERS}))
        raise UnsupportedModel(
            f"{vocabulary.path}: pre-tokenizer {name!r} is not known; known are {known}: give token ids"
        )
    backend = _backend(gguf, vocabulary, ignore_merges=pre.ignore_merges)
    cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    return Scheme(
        lambda text: list(backend.encode(text, add_special_tokens=False).ids),
        _spell_bytes,
        add_bos=vocabulary.flag("add_bos_token", pre.add_bos),
        add_eos=vocabulary.flag("add_eos_token", False),
        bos=vocabulary.named("bos"),
        eos=vocabulary.named("eos"),
    )


def gemma4(gguf: GGUF, vocabulary: Vocabulary) -> Scheme:
    return _line_bpe(gguf, vocabulary, LINE_TOKENIZERS["gemma4"])


def _line_bpe(gguf: GGUF, vocabulary: Vocabulary, lines: LineTokenizer) -> Scheme:
    ids, unknown, bos = vocabulary.ids, vocabulary.named("unknown"), vocabulary.named("bos")
    vocabulary.byte_ids(unknown)
    unk_token = None if unknown is None else vocabulary.tokens[unknown]
    backend = _backend(gguf, vocabulary, byte_fallback=True, unk_token=unk_token)

    def encode(text: str) -> list[int]:
        out: list[int] = []
        for line in _LINES.findall(text.replace(" ", SPACE)):
            whole = ids.get(line) if lines.whole_runs and line[0] == "\n" else None
            if whole is not None:
                out.append(whole)
            elif lines.words and line[0] != "\n":
                for word in _WORDS.findall(line if line[0] == SPACE else SPACE + line):
                    out += backend.encode(word, add_special_tokens=False).ids
            else:
                out += backend.encode(line, add_special_tokens=False).ids
        return out

    return Scheme(
        encode,
        spell_spaced,
        # The flag is wrong in early Gemma 4 files, so `always_bos` ignores it.
        add_bos=bos is not None if lines.always_bos else vocabulary.flag("add_bos_token", False),
        add_eos=vocabulary.flag("add_eos_token", False),
        bos=bos,
        eos=vocabulary.named("eos"),
    )


def whitespace_bpe(gguf: GGUF, vocabulary: Vocabulary) -> Scheme:
    # An unknown character becomes an empty token, which no merge crosses and `encode` removes.
    backend = _backend(gguf, vocabulary, unk_token="")
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    lower, n_vocab = vocabulary.flag("normalizer.lowercase", False), len(vocabulary)

    def encode(text: str) -> list[int]:
        ids = backend.encode(text.lower() if lower else text, add_special_tokens=False).ids
        return [i for i in ids if i < n_vocab]

    return Scheme(
        encode,
        str.encode,
        add_bos=vocabulary.flag("add_bos_token", False),
        add_eos=vocabulary.flag("add_eos_token", False),
        bos=vocabulary.named("bos"),
        eos=vocabulary.named("eos"),
    )


# ---- merges ----


def _backend(
    gguf: GGUF,
    vocabulary: Vocabulary,
    *,
    ignore_merges: bool = False,
    byte_fallback: bool = False,
    unk_token: str | None = None,
) -> Backend:
    # A repeated merge has its first rank. The library would use the last rank.
    merges, ids = list(dict.fromkeys(gguf.strings("tokenizer.ggml.merges"))), vocabulary.ids
    pairs: list[Any] = [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        # The library panics if a merged text is not a token.
        if not all(map(ids.__contains__, map("".join, pairs))):
            raise KeyError
        model = BPE(
            vocab=ids if unk_token != "" else ids | {"": len(vocabulary)},
            merges=pairs,
            ignore_merges=ignore_merges,
            byte_fallback=byte_fallback,
            unk_token=unk_token,
        )
    except Exception as e:  # the library raises a bare Exception
        wrong = next(merge for merge in merges if not _joins(merge, ids))
        raise GGUFError(
            f"{vocabulary.path}: merge {wrong!r} does not join two tokens into a third one"
        ) from e
    return Backend(model)


def _joins(merge: str, ids: Mapping[str, int]) -> bool:
    left, _, right = merge.partition(" ")
    return {left, right, left + right} <= ids.keys()
