"""Special tokens in a text are found in bounded time, with the same result as a simple definition."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from gguf_files import F32, array, vocabulary
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_cases import examples

from vkbackend.errors import GGUFError
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.prefix import n_common
from vkbackend.models.text.special_tokens import MAX_LENGTH, SpecialTokens
from vkbackend.models.text.tokenizer import Tokenizer

pytestmark = pytest.mark.no_vulkan

USER_DEFINED, BYTE = 4, 6


def defined(text: str, tokens: list[str]) -> list[str | int]:
    """Extract every occurrence of the longest token (in bytes). Then do the same with each shorter token in
    the remaining text."""
    parts: list[str | int] = [text] if text else []
    for token in sorted(tokens, key=lambda token: (-len(token.encode()), tokens.index(token))):
        cut: list[str | int] = []
        for part in parts:
            if isinstance(part, int):
                cut.append(part)
                continue
            for i, piece in enumerate(part.split(token)):
                cut += ([tokens.index(token)] if i else []) + ([piece] if piece else [])
        parts = cut
    return parts


alphabets = st.sampled_from(["a", "ab", "abc", "aé", "ab日🦙"])


@settings(max_examples=examples(400), deadline=1000)
@given(
    alphabets.flatmap(
        lambda a: st.tuples(
            st.text(a, max_size=60), st.lists(st.text(a, min_size=1, max_size=9), unique=True, max_size=25)
        )
    )
)
@example(("abcd", ["bcd", "ab", "a"]))
@example(("ab", ["é", "ab", "b"]))
@example(("xaab", ["ab", "xa", "a"]))
@example(("a" * 11, ["aaaa", "aaa", "aa"]))
@example(("ab" * 5, ["baba", "aba", "ab"]))
def test_the_definition(case: tuple[str, list[str]]) -> None:
    text, tokens = case
    assert SpecialTokens((token, i) for i, token in enumerate(tokens)).cut(text) == defined(text, tokens)


@given(st.text("ab", max_size=20), st.text("ab", max_size=20))
def test_common_beginning(a: str, b: str) -> None:
    n = n_common(a, b)
    assert (a[:n] == b[:n] and a[n : n + 1] != b[n : n + 1]) or n == len(a) == len(b)


def test_runs_and_overlaps_at_full_length() -> None:
    n = 300
    runs = ["a" * k for k in range(1, n)]
    for tokens, text in (
        (runs, "a" * 1000),
        (runs[1:], "aaab" * 200),
        (["c" * n + "a" * (n // 2), *runs], ("c" * n + "a" * n) * 2),
        ([f"{'z' * k}y" for k in range(1, n)] + ["zz"], "z" * 700 + "y"),
    ):
        assert SpecialTokens((token, i) for i, token in enumerate(tokens)).cut(text) == defined(text, tokens)


# ---- costs ----


def load_tokenizer(path: Path, special: list[str]) -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *special]
    types = [2, 3, 3, *[BYTE] * 256, *[USER_DEFINED] * len(special)]
    scores = array("tokenizer.ggml.scores", F32, [0.0] * len(tokens))
    path.write_bytes(vocabulary("llama", tokens, types=types, extra=[scores]))
    with GGUF.open(path) as gguf:
        return Tokenizer.from_gguf(gguf)


TEXT_FOLDER = f"{os.sep}text{os.sep}"


def n_lines(tokenizer: Tokenizer, text: str) -> int:
    n = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal n
        if TEXT_FOLDER not in frame.f_code.co_filename or frame.f_code.co_filename.endswith("spm.py"):
            return None
        n += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        tokenizer.encode(text, parse_special=True)
    finally:
        sys.settrace(before)
    return n


HITS = "".join(f"<|x{i:04d}|>, " for i in range(64))
TEXTS = {"no token": "once < upon <| a time " * 40, "tokens": HITS, "runs": "a" * 500 + "<|" * 500}


@pytest.mark.parametrize("name", TEXTS)
def test_costs_do_not_grow_with_the_vocabulary(tmp_path: Path, name: str) -> None:
    few, many = (
        load_tokenizer(tmp_path / "v.gguf", ["aa", "aaaaa", "<|", *(f"<|x{i:04d}|>" for i in range(n))])
        for n in (500, 8000)
    )
    text = TEXTS[name]
    short, long = n_lines(few, text), n_lines(many, text)
    assert 0 < long <= 1.2 * short
    assert n_lines(many, text * 4) <= 4.5 * long


def test_overlapping_tokens_cost_no_more() -> None:
    """Most tokens that `_fitting` proposes do not fit, because the longest tokens overlap the ends of shorter
    tokens."""
    costs = []
    for n in (32, 128, 512):
        runs = ["c" * n + "a" * (n // 2), *("a" * k for k in range(2, n))]
        tokens = SpecialTokens((token, i) for i, token in enumerate(runs))
        n_asked, fitting = 0, tokens._fitting

        def counted(*args: Any, of: Any = fitting) -> int:
            nonlocal n_asked
            n_asked += 1
            return of(*args)

        tokens._fitting = counted  # type: ignore[method-assign]
        text = ("c" * n + "a" * (n - 1)) * (8192 // n)
        tokens.cut(text)
        costs.append(n_asked / len(text))
    assert max(costs) <= 3, costs


def test_words_that_begin_like_tokens_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = SpecialTokens([("zq1", 0), ("ab", 1)])
    asked, fitting = list[int](), tokens._fitting
    monkeypatch.setattr(tokens, "_fitting", lambda *args: asked.append(1) or fitting(*args))
    text = "zebra area " * 500 + "zq2 " * 3
    assert tokens.cut(text + "ab") == [text, 1] and len(asked) == 4


def test_a_special_token_has_a_longest_length(tmp_path: Path) -> None:
    longest = "x" * MAX_LENGTH
    tokenizer = load_tokenizer(tmp_path / "v.gguf", [longest])
    assert tokenizer.encode(longest + "<", add_special=False)[0] == 259
    with pytest.raises(GGUFError, match="special token 259 has 1025 characters, at most 1024"):
        load_tokenizer(tmp_path / "v.gguf", [longest + "x"])
