"""WordPiece, Unigram, RWKV's tokenizer and lower-case words produce llama.cpp's ids, which `golden/`
stores."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import make_kinds as oracle
from random_cases import examples

from vkbackend.errors import GGUFError
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text import rwkv
from vkbackend.models.text.character_map import CharacterMap
from vkbackend.models.text.tokenizer import Tokenizer

pytestmark = pytest.mark.no_vulkan

PATH = Path("model.gguf")


def kept(name: str) -> dict[str, Any]:
    return json.loads((oracle.GOLDEN / f"kind-{name}.json").read_text(encoding="utf-8"))


def load_tokenizer(path: Path, vocabulary: dict[str, Any]) -> Tokenizer:
    with GGUF.open(oracle.write(path / "v.gguf", vocabulary)) as gguf:
        return Tokenizer.from_gguf(gguf)


def compared(name: str, text: str) -> bool:
    return name != "bert" or not any(unicodedata.category(c) == "Mc" for c in text)


@pytest.mark.parametrize("name", oracle.MAKE)
def test_ids(name: str, tmp_path: Path) -> None:
    vocabulary = kept(name)
    tokenizer = load_tokenizer(tmp_path, vocabulary)
    rows = list(zip(vocabulary["texts"], vocabulary["ids"], vocabulary["parsed"], strict=True))
    rows = [row for row in rows if compared(name, row[0])]
    assert len(rows) > 80
    for text, ids, parsed in rows:
        assert tokenizer.encode(text, add_special=False) == ids, repr(text)
        assert tokenizer.encode(text, parse_special=True) == parsed, repr(text)
    if name != "words":  # llama.cpp decodes the characters of this kind as bytes.
        assert [tokenizer.piece(i).hex() for i in range(tokenizer.n_vocab)] == vocabulary["pieces"]


def test_round_trips(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, kept("rwkv"))
    for text in ("", "a\\n\n\t", "日本 🦙 \u0301", "<s>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (
        load_tokenizer(tmp_path, kept("t5")).decode(
            load_tokenizer(tmp_path, kept("t5")).encode(" the   day ")
        )
        == "the day"
    )


@given(st.binary(max_size=12), st.data())
def test_the_longest_token_is_taken(raw: bytes, data: st.DataObject) -> None:
    some = data.draw(st.sets(st.binary(min_size=1, max_size=6), max_size=8))
    some |= {raw[i:j] for i, j in ((0, 3), (1, 6), (2, 4)) if raw[i:j]}
    ids = {
        token: i
        for i, token in enumerate([*(bytes([b]) for b in range(256)), *(s for s in some if len(s) > 1)])
    }
    text_of, at, want = {i: token for token, i in ids.items()}, 0, list[int]()
    while at < len(raw):
        best = max((t for t in ids if raw.startswith(t, at)), key=len)
        want.append(ids[best])
        at += len(best)
    assert rwkv._Longest(ids).encode(raw) == want and b"".join(text_of[i] for i in want) == raw


def test_words_too_long_for_bert_are_unknown(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, kept("bert"))
    assert (
        tokenizer.encode("a" * 101, add_special=False)
        == [1]
        != tokenizer.encode("a" * 100, add_special=False)
    )


@pytest.mark.oracle
@pytest.mark.parametrize("name", oracle.MAKE)
def test_llama_cpp_still_says_so(name: str) -> None:
    pytest.importorskip("xllamacpp")
    vocabulary = kept(name)
    assert {**vocabulary, **oracle.asked(vocabulary, vocabulary["texts"])} == vocabulary


# ---- the character map ----


@settings(max_examples=examples(200))
@given(
    st.dictionaries(st.text("abé日", min_size=1, max_size=4), st.text("xyé", max_size=3), max_size=12),
    st.text("abcé日", max_size=20),
)
def test_the_longest_text_is_replaced(replaced: dict[str, str], text: str) -> None:
    rest, want = text, ""
    while rest:
        longest = max((t for t in replaced if rest.startswith(t)), key=len, default="")
        want += replaced[longest] if longest else rest[0]
        rest = rest[len(longest) or 1 :]
    raw = oracle.character_map(replaced) if replaced else b""
    assert CharacterMap(list(raw), PATH)(text) == want


def test_damaged_maps() -> None:
    good = oracle.character_map({"a": "b"})
    for raw in (good[:3], b"\xff" * 40, good[: len(good) // 2], b"\2\0\0\0abcd"):
        with pytest.raises(GGUFError, match=r"precompiled_charsmap"):
            CharacterMap(list(raw), PATH)
    rng = np.random.default_rng(0)
    for _ in range(200):
        noise = rng.integers(0, 256, 400, np.uint8).tobytes()
        assert isinstance(
            CharacterMap(list((400).to_bytes(4, "little") + noise + b"ab"), PATH)("aaabé日"), str
        )


# ---- malformed ----


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("t5", {"scores": [0.0]}, "'tokenizer.ggml.scores' has 1"),
        ("t5", {"special_ids": {"unknown": 10_000}}, "unknown_token_id' is 10000"),
        ("bert", {"tokens": ["a"], "types": [1], "special_ids": {}}, "no unknown token"),
        ("rwkv", {"tokens": ["a"], "types": [1], "special_ids": {}}, "no token for the byte 0x00"),
        ("words", {"merges": ["q z"]}, "does not join two tokens"),
    ],
)
def test_malformed(name: str, changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=words):
        load_tokenizer(tmp_path, {**kept(name), **changed})
