"""Merges by score follow SentencePiece's definition, in few steps and little memory."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from counted_calls import counted_calls
from device_sets import wide
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_cases import examples
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from vocabularies import OWN, THEIRS, load

from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text import spm
from vkbackend.models.text.spm import SpmMerger
from vkbackend.models.text.vocabulary import SPACE


def plain_merge(text: str, ids: dict[str, int], scores: Sequence[float]) -> list[str]:
    """Merge the pair with the best score, or the leftmost of equal pairs, in quadratic time. This is the
    definition."""
    symbols = list(text)
    while True:
        pairs = [(ids.get(a + b), i) for i, (a, b) in enumerate(itertools.pairwise(symbols))]
        merges = [(-scores[token], i) for token, i in pairs if token is not None]
        if not merges:
            return symbols
        i = min(merges)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@settings(max_examples=examples(400), deadline=None)
@given(
    st.sets(st.text(alphabet="ab_", min_size=1, max_size=5), max_size=25),
    st.text(alphabet="abc_", max_size=40),
    st.randoms(use_true_random=False),
    st.sampled_from((0, 64)),
)
@example({"a_a_b", "a_a", "_b"}, "ca_a_bc", random.Random(1), 64)
@example({"a_", "a__"}, "a____b", random.Random(1), 64)
def test_merges_follow_the_definition(
    tokens: set[str], text: str, rng: random.Random, max_pairs: int
) -> None:
    """Some scores are equal, some characters are not tokens, and some tokens contain spaces, which the cases
    write as "_"."""
    tokens, text = {token.replace("_", SPACE) for token in tokens}, text.replace("_", SPACE)
    ids = {t: i for i, t in enumerate(sorted(tokens))}
    scores = [float(rng.randint(0, 3)) for _ in ids]
    bytes_from = len(ids)
    want: list[int] = []
    for symbol in plain_merge(text, ids, scores):
        want += [ids[symbol]] if symbol in ids else [bytes_from + b for b in symbol.encode()]
    with mock.patch.object(spm, "_MAX_PAIRS", max_pairs):
        merger = SpmMerger(ids, scores, range(bytes_from, bytes_from + 256))
    assert merger.encode(text) == want


def test_words_are_cached_next_to_tokens_that_contain_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3 has such tokens. Encoding took three times as long without cached words."""
    merged = list[str]()
    monkeypatch.setattr(SpmMerger, "_merge", lambda self, word: merged.append(word) or [0])
    ids = {text: i for i, text in enumerate(("a", f"a{SPACE}b", f";{SPACE}", f"{SPACE}a"))}
    merger = SpmMerger(ids, [0.0] * 4, range(256))
    merger.encode(SPACE.join(["x", "c", "a", "c", "a", "b", "c;", "", "c", "c"]))
    assert merged == ["x", *(SPACE + w for w in ("c", "a", f"a{SPACE}b", f"c;{SPACE}{SPACE}c"))]


@pytest.mark.parametrize("letter", ["x", SPACE, wide(pytest.param("\u0301"))])
def test_merging_takes_n_log_n_steps(letter: str) -> None:
    ids = {letter * n: i for i, n in enumerate((1, 2, 3, 4, 8, 16))}
    scores, calls = [-float(i) for i in range(len(ids))], []
    for n in (1_000, 16_000):
        merger = SpmMerger(ids, scores, range(256))
        with counted_calls() as counted:
            merger.encode(letter * n)
        calls.append(counted.total())
    assert 1_000 < calls[0] and calls[1] <= 1.1 * 16 * calls[0]


def test_ranked_merges_cannot_express_leftmost_of_equal_scores() -> None:
    """The `tokenizers` library orders merges by ranks, not by scores. The texts "aba" and "bab" need
    different ranks, so each ranking of merges is wrong for one of them. It cannot run SPM."""
    ids, scores = {"a": 0, "b": 1, "ab": 2, "ba": 3}, [0.0] * 4
    merger = SpmMerger(ids, scores, [0] * 256)
    assert (merger.encode("aba"), merger.encode("bab")) == ([2, 0], [3, 1])
    for merges in ([("a", "b"), ("b", "a")], [("b", "a"), ("a", "b")]):
        ranked = Backend(BPE(vocab=ids, merges=merges))
        assert (ranked.encode("aba").ids, ranked.encode("bab").ids) != ([2, 0], [3, 1])


def test_cached_words_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of 65,536 words took 20 MB, too much for a server."""
    merged = {f"{SPACE}{i:x}abcd": [i % 300, 301, 302] for i in range(40_000)}
    monkeypatch.setattr(SpmMerger, "_merge", lambda self, word: merged[word].copy())
    merger = SpmMerger({"a": 0}, [0.0], range(256))
    tracemalloc.start()
    try:
        for word, ids in merged.items():
            assert merger.encode(word) == ids
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 4_000_000


@pytest.mark.parametrize(
    "path", [OWN[0], *map(wide, map(pytest.param, THEIRS[:1]))], ids=lambda path: path.stem
)
def test_scores_agree_with_ranked_merges(models: Path, path: Path) -> None:
    with GGUF.open(path) as g:
        tokens, scores = g.strings("tokenizer.ggml.tokens"), g.floats("tokenizer.ggml.scores").tolist()
    ids = {t: i for i, t in enumerate(tokens)}
    splits = ((t[:k], t[k:]) for t in tokens for k in range(1, len(t)))
    merges = [(a, b) for a, b in splits if a in ids and b in ids]
    merges.sort(key=lambda m: (-scores[ids[m[0] + m[1]]], ids[m[0]], ids[m[1]]))
    ranked = Backend(BPE(vocab=ids, merges=merges, byte_fallback=True, unk_token="<unk>"))
    ours, rng = load(path), random.Random(0)
    text = (models / "stories.txt").read_text(encoding="utf-8")
    whole = [t for t in tokens if len(t) > 1 and "<0x" not in t]
    for _ in range(300):
        start = rng.randrange(len(text) - 300)
        for case in (text[start : start + 300], "".join(rng.choices(whole, k=8)).replace(SPACE, " ")):
            want = ranked.encode((" " + case).replace(" ", SPACE), add_special_tokens=False).ids
            assert ours.encode(case, add_special=False) == want, repr(case)
