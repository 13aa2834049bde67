"""The pre-tokenizers' regular expressions split a text correctly, lose no character, and take linear time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from device_sets import product, some, wide
from gguf_files import U32, key
from tokenizers import Regex, pre_tokenizers
from vocabularies import (
    Build,
    bpe_extra,
)

from vkbackend.models.text.pre_tokenizers import PRE_TOKENIZERS
from vkbackend.models.text.tokenizer import Tokenizer

DISTINCT = sorted({pre: name for name, pre in PRE_TOKENIZERS.items()}.values())
LONG_RUNS = (" ", "\n", "a")
OTHER_RUNS = ("1", "'", "\u0301", "\t", "A", "日", " a", "\u3000")
RUNS = LONG_RUNS + OTHER_RUNS


def cuts(name: str, text: str) -> list[str]:
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in PRE_TOKENIZERS[name].patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.fixture(params=DISTINCT)
def byte_level(request: pytest.FixtureRequest, build: Build) -> Tokenizer:
    """Return a tokenizer of the 256 bytes. Its merges show where the pre-tokenizer splits."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(b) for b in plain] + [chr(0x100 + i) for i in range(256 - len(plain))]
    pairs = ["1 1", "a a", "\u0120 a", "a 1", "\u010a \u010a", "\u0120 \u0120"]
    tokens = [*alphabet, *(p.replace(" ", "") for p in pairs)]
    extra = [*bpe_extra(pairs, request.param), key("tokenizer.ggml.bos_token_id", U32, 0)]
    return build("gpt2", tokens, extra)


def test_pre_tokenizers(byte_level: Tokenizer, request: pytest.FixtureRequest) -> None:
    """Every pre-tokenizer except Bloom's splits between letters and digits."""
    text = 'aa11 a  \n\n é日本\'S Ünï, 12345\t"x" ー。Ω\u212a\u1f7d'
    assert byte_level.decode(byte_level.encode(text, add_special=False)) == text
    pieces = [byte_level.piece(i) for i in byte_level.encode("a1", add_special=False)]
    bloom = PRE_TOKENIZERS[request.node.callspec.params["byte_level"]] == PRE_TOKENIZERS["bloom"]
    assert pieces == ([b"a1"] if bloom else [b"a", b"1"])
    for run in RUNS:
        for end in ("", "x", "1"):
            long = run * 300 + end
            assert byte_level.decode(byte_level.encode(long, add_special=False)) == long


# These pre-tokenizers look ahead to group digits by three. Others take one to three digits at a time.
GROUPS = [name for name in DISTINCT if any("{3})" in pattern for pattern in PRE_TOKENIZERS[name].patterns)]
CLASSES, DIGITS = pytest.param(LONG_RUNS, id="classes"), pytest.param(("1",), id="digits")
OTHERS = wide(pytest.param(OTHER_RUNS, id="others"))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("name", "runs"),
    [*some(product(DISTINCT, [CLASSES]), 2), *product(DISTINCT, [OTHERS]), *product(GROUPS, [DIGITS])],
)
def test_cuts_of_long_runs(name: str, runs: Sequence[str]) -> None:
    """Splitting takes linear time. The expression \\s+$ would take 40 s on spaces before a digit."""
    for run in runs:
        assert "".join(cuts(name, run * 100_000 + "1")) == run * 100_000 + "1"


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("llama-bpe", "I'M 12345 a\n\n b", ["I", "'M", " ", "123", "45", " a", "\n\n", " b"]),
        ("qwen2", "I'M 12345 a\n\n b", ["I", "'M", " ", *"12345", " a", "\n\n", " b"]),
        ("gpt-2", "I'M 12345 a\n\n b", ["I", "'", "M", " 12345", " a", "\n\n", " b"]),
        ("starcoder", "I'M 123 a", ["I", "'", "M", " ", *"123", " a"]),
        ("default", "a,, 12345", ["a", ",,", " ", "123", "45"]),
        ("falcon", "a`` 12345", ["a", "``", " ", "123", "45"]),
        ("deepseek-v3", "a+b日本12345", ["a", "+b", "日本", "123", "45"]),
        ("deepseek-llm", " 12 日本  7", [" ", "1", "2", " ", "日本", "  ", "7"]),
        ("deepseek-llm", "x 日 ab  \n", ["x", " ", "日", " ab", "  ", "\n"]),
        ("deepseek-coder", "if (日)12", ["if", " (", "日", ")", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        (
            "kimi-k2",
            "helloWorld漢字abc'S 1234!/\n",
            ["hello", "World", "漢字", "abc'S", " ", "123", "4", "!/\n"],
        ),
        ("tekken", "HelloWorld's 12", ["Hello", "World", "'s", " ", "1", "2"]),
        ("qwen35", "e\u0301x", ["e\u0301x"]),
        ("qwen2", "e\u0301x", ["e", "\u0301x"]),
        ("seed-coder", "a;\n", ["a", ";", "\n"]),
        ("bailingmoe", "I'M a \n\n", ["I", "'M", " a", " \n\n"]),
    ],
)
def test_cuts(name: str, text: str, pieces: list[str]) -> None:
    assert cuts(name, text) == pieces
