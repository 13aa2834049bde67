"""The demo model's grammar and vocabulary produce consistent stories, and joined pieces equal the text. The
tests need no PyTorch and no Vulkan.
"""

import random
import re
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import examples

from vkbackend.tools import train_demo
from vkbackend.tools.demo import stories as grammar
from vkbackend.tools.demo.stories import Story, tell_story
from vkbackend.tools.demo.vocabulary import (
    BOS,
    CHUNK,
    EOS,
    N_SPECIAL,
    N_VOCAB_MIN,
    SPACE,
    Vocabulary,
    train_vocabulary,
)

pytestmark = pytest.mark.no_vulkan


N_STORIES = 2000


@pytest.fixture(scope="module")
def stories() -> list[Story]:
    rng = random.Random(7)
    return [tell_story(rng) for _ in range(N_STORIES)]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return train_vocabulary(1024, seed=1, n_stories=1500)


def test_same_seed_same_story() -> None:
    def three(seed: int) -> list[Story]:
        rng = random.Random(seed)
        return [tell_story(rng) for _ in range(3)]

    assert three(5) == three(5)
    assert three(5) != three(6)


def test_stories_differ(stories: list[Story]) -> None:
    assert len({story.text for story in stories}) == N_STORIES
    assert len({story.hero for story in stories}) > 200
    assert {story.thing for story in stories} >= {"lantern", "key", "seeds", "telescope"}


def test_form(stories: list[Story]) -> None:
    for story in stories:
        text = story.text
        assert grammar.WORDS_MIN <= len(text.split()) <= grammar.WORDS_MAX, text
        assert text.isascii() and not set(text) & set("{}|?\n") - {"?"}, text
        assert "  " not in text and text.count('"') % 2 == 0, text
        for sentence in re.split(r'(?<=[.!?])"? ', text):
            assert re.match(r'"?[A-Za-z]', sentence), sentence
        assert text[-1] in '.!"' and text[0].isupper(), text
        assert not re.search(r"\ba [aeiou]|\ban [^aeiou]", text), text


def test_story_remembers(stories: list[Story]) -> None:
    for story in stories:
        alone, together = story.text.split(f" {story.friend}", 1)
        assert all(word in alone for word in (story.hero, story.kind, story.home, story.thing)), story
        assert together.count(story.hero) >= 2 and story.thing in together, story
        assert story.friend in together and story.friend != story.kind, story


def test_pronouns_agree(stories: list[Story]) -> None:
    other = {"she": r"\b(he|him|his)\b", "he": r"\b(she|her|hers)\b"}
    for story in stories:
        alone = story.text.split(f" {story.friend}", 1)[0].lower()
        assert not re.search(other[story.pronoun], alone), story


def test_vocabulary_layout(vocabulary: Vocabulary) -> None:
    assert len(vocabulary.pieces) == len(vocabulary.scores) == len(set(vocabulary.pieces)) == 1024
    assert vocabulary.pieces[:4] == ["<unk>", "<s>", "</s>", "<0x00>"]
    assert vocabulary.pieces[N_SPECIAL - 1] == "<0xFF>"
    assert vocabulary.scores[N_SPECIAL:] == sorted(vocabulary.scores[N_SPECIAL:], reverse=True)


def test_pieces_stay_inside_chunks(vocabulary: Vocabulary) -> None:
    for piece in vocabulary.pieces[N_SPECIAL:]:
        assert CHUNK.findall(piece) == [piece]


def test_vocabulary_is_used(vocabulary: Vocabulary, stories: list[Story]) -> None:
    for story in stories[:200]:
        ids = vocabulary.encode(story.text)
        assert vocabulary.decode([BOS, *ids, EOS]) == story.text
        assert min(ids) >= N_SPECIAL, "a story needs no byte tokens"
        assert len(ids) < 2 * len(story.text.split())


def spm_whole_text(vocabulary: Vocabulary, text: str) -> list[str]:
    """Tokenize by SentencePiece's rule: merge the adjacent pair with the best score, and the leftmost of
    equal pairs."""
    scores = dict(zip(vocabulary.pieces, vocabulary.scores, strict=True))
    symbols = list(SPACE + text.replace(" ", SPACE))
    while True:
        joined = [a + b for a, b in pairwise(symbols)]
        best = max((pair for pair in joined if pair in scores), key=scores.__getitem__, default=None)
        if best is None:
            return symbols
        i = joined.index(best)
        symbols[i : i + 2] = [best]


def test_chunks_encode_like_the_whole_text(vocabulary: Vocabulary, stories: list[Story]) -> None:
    for story in stories[:8]:
        pieces = [vocabulary.pieces[i] for i in vocabulary.encode(story.text)]
        assert pieces == spm_whole_text(vocabulary, story.text)


@settings(deadline=None, max_examples=examples(50))
@given(text=st.text(st.characters(exclude_characters=SPACE, exclude_categories=["Cs"]), max_size=40))
def test_any_text_survives(vocabulary: Vocabulary, text: str) -> None:
    assert vocabulary.decode(vocabulary.encode(text)) == text


def test_rows_are_cut_to_length(vocabulary: Vocabulary) -> None:
    rows = train_demo.token_rows(vocabulary, seed=3, n=64)
    first, second = next(rows), next(rows)
    assert len(first) == len(second) == 65 and first[0] == second[0] == BOS and first != second


def test_command_prints_stories_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from vkbackend.tools import train_demo; "
    code += "sys.exit(train_demo.main())"
    run = [sys.executable, "-c", code, "--stories", "2", "--seed", "5"]
    done = subprocess.run(run, capture_output=True, text=True, encoding="utf-8", check=True, timeout=60)
    rng = random.Random(5)
    assert done.stdout == f"{tell_story(rng).text}\n\n{tell_story(rng).text}\n"
    untrained = subprocess.run(run[:3], capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert untrained.returncode == 2
    assert "PyTorch" in untrained.stderr and "pip install 'vkbackend[train]'" in untrained.stderr


@pytest.mark.parametrize(
    "option", [["--steps", "0"], ["--minutes", "nan"], ["--minutes", "-1"], ["--lr", "x"]]
)
def test_command_refuses(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        train_demo.main(option)
    assert refused.value.code == 2
    assert option[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--n-head", "5"], "5 heads"),
        (["--n-head-kv", "5"], "5 kv heads"),
        (["--n-ff", "172"], "--type F16"),
        (["--n-vocab", "300"], "choose at least"),
    ],
)
def test_command_refuses_sizes_before_it_trains(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_demo.main(options) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_fewest_tokens_hold_the_stories(stories: list[Story]) -> None:
    assert len(set("".join(story.text for story in stories))) <= N_VOCAB_MIN - N_SPECIAL
