from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkbackend.models.drafting.drafter import Draft, Want
from vkbackend.models.drafting.ngram import LENGTHS, Ngrams

pytestmark = pytest.mark.no_vulkan


def ask(ngrams: Ngrams, tokens: list[int], n: int, slot: int = 0, number: int = 0) -> Draft:
    [draft] = ngrams.draft([Want(slot, number, tokens, tokens, n)])
    return draft


def searched(tokens: list[int], n_max: int) -> list[int]:
    """Find the longest end of the text that occurs earlier, and its last earlier occurrence. Return the
    tokens after it. The search is linear."""
    end = len(tokens)
    for n in LENGTHS:
        for at in range(end - 1, n - 1, -1):
            if end > n and tokens[at - n : at] == tokens[end - n :]:
                return [tokens[at + i % (end - at)] for i in range(n_max)]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=120), st.integers(1, 9), st.data())
def test_drafts_are_those_of_a_linear_search(tokens: list[int], n: int, data: st.DataObject) -> None:
    """The text arrives in pieces, as prompts and accepted tokens do. A table entry may be overwritten by an
    ngram with the same hash, but with 2 ** 10 entries and 120 tokens this does not happen here."""
    ngrams, at = Ngrams(1, 512), 0
    while at < len(tokens):
        at = min(len(tokens), at + data.draw(st.integers(1, 40)))
        draft = ask(ngrams, tokens[:at], n)
        expected = searched(tokens[:at], n)
        if list(draft.tokens) != expected:
            assert len(draft.tokens) in (0, n), draft


def test_the_longest_end_and_its_last_occurrence_win() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 50, 5, 6, 7, 9, 51, 1, 2, 3, 4, 5, 6]
    draft = ask(Ngrams(1, 64), tokens, 3)
    assert draft == Draft([7, 8, 50], "ngram-6")
    assert ask(Ngrams(1, 64), tokens[:12], 3) == Draft([8, 50, 5], "ngram-3")
    assert ask(Ngrams(1, 64), list(range(30)), 3) == Draft()


def test_a_text_that_repeats_itself_is_continued() -> None:
    assert ask(Ngrams(1, 64), [7, 8, 9] * 4, 7) == Draft([7, 8, 9, 7, 8, 9, 7], "ngram-6")


def test_another_sequence_in_the_slot_has_its_own_text() -> None:
    ngrams = Ngrams(2, 64)
    text = [1, 2, 3, 4, 1, 2, 3]
    assert ask(ngrams, text, 1).tokens == [4]
    assert ask(ngrams, text, 1, slot=1, number=1).tokens == [4]
    assert ask(ngrams, [5, 1, 2, 3], 1, number=2) == Draft()
    assert ask(ngrams, [5, 1, 2, 3, 9, 1, 2, 3], 1, number=2).tokens == [9]


def test_long_texts_of_large_ids() -> None:
    rng = random.Random(1)
    text = [rng.randrange(1 << 18) for _ in range(5000)]
    ngrams = Ngrams(1, 8192)
    assert ask(ngrams, text, 4) == Draft()
    hits = sum(
        ask(ngrams, text + text[at : at + 8], 4, number=at).tokens == text[at + 8 : at + 12]
        for at in range(0, 4000, 400)
    )
    assert hits == 10
