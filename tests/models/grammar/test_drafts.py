"""Masks of drafted tokens equal the masks that are computed token by token."""

from __future__ import annotations

import random

import numpy as np
import pytest

from vkbackend.models.grammar.compiler import MAX_DRAFTED, Compiler, Matcher, Vocabulary
from vkbackend.models.grammar.structure import Structure

pytestmark = pytest.mark.no_vulkan

LETTERS = "abcxyz(),0123456789"
WORDS = Vocabulary((*(c.encode() for c in LETTERS), b"<end>"), (len(LETTERS),), (len(LETTERS),))
GRAMMAR = 'start: point ("," point)*\npoint: "(" /[0-9]{1,3}/ "," NAME ")"\nNAME: /[a-c]+/'


@pytest.fixture
def matcher() -> Matcher:
    pytest.importorskip("llguidance")
    compiler = Compiler(WORDS)
    try:
        return compiler.start(compiler.compile(Structure("lark", GRAMMAR)).result(60))
    finally:
        compiler.close()


def step(matcher: Matcher, rng: random.Random) -> int:
    token = int(rng.choice(list(matcher.allowed(len(WORDS.pieces)))))
    matcher.take(token)
    return token


@pytest.mark.parametrize("seed", range(5))
def test_rows_ahead(matcher: Matcher, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        text, twin = [], matcher._matcher.deep_copy()
        ahead = Matcher(twin, len(WORDS.pieces))
        rows = []
        for _ in range(rng.randint(1, MAX_DRAFTED)):
            if ahead.is_over:
                break
            ahead.find()
            rows.append(ahead.words[0].copy())
            text.append(step(ahead, rng))
        draft = text[: len(rows) - 1]
        assert matcher.n_valid(draft) == len(draft)
        matcher.find(draft)
        assert np.array_equal(matcher.words[: len(rows)], rows), "the matcher's own state is unchanged"
        for token, row in zip(text, rows, strict=True):
            assert np.array_equal(matcher.words[matcher._row], row)
            matcher.take(token)
        if matcher.is_over:
            return


def test_invalid_tokens_are_cut(matcher: Matcher) -> None:
    draft = [LETTERS.index(c) for c in "(1,z)"]
    assert matcher.n_valid(draft) == 3 and matcher.n_valid([LETTERS.index("x")]) == 0
    matcher.find()
    assert list(matcher.allowed(len(WORDS.pieces))) == [LETTERS.index("(")]


def test_only_the_end_follows_an_end_token(matcher: Matcher) -> None:
    end = len(LETTERS)
    draft = [*(LETTERS.index(c) for c in "(1,a)"), end]
    assert matcher.n_valid(draft) == len(draft)
    matcher.find(draft)
    assert not matcher.words[len(draft)].any() or matcher.words[len(draft)].tolist() == [1 << end]
    assert matcher.words[len(draft) - 1].any()
