"""Tokenizers: vectors of small and real vocabularies, merging, streaming, hostile vocabularies and texts.

Long because all of it shares the vocabularies that `build` writes.
"""

import codecs
import itertools
import json
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from counted_calls import counted_calls
from gguf_files import BOOL, F32, I32, STRING, U32, array, gguf_bytes, key, vocabulary
from hypothesis import example, given, settings
from hypothesis import strategies as st
from material import DATA, SHARED_VOCABULARIES
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from vkbackend.errors import GGUFError, InvalidArgument, UnsupportedModel, VkbackendError
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text import spm
from vkbackend.models.text.pre_tokenizers import PRE_TOKENIZERS
from vkbackend.models.text.spm import SpmMerger
from vkbackend.models.text.tokenizer import MAX_TEXT, Tokenizer
from vkbackend.models.text.vocabulary import SPACE

SPM, BYTES, QWEN2 = OWN = [DATA / "vocab" / f"{name}.gguf" for name in ("llama-spm", "llama-bpe", "qwen2")]
THEIRS = [path for own in OWN if (path := SHARED_VOCABULARIES / f"ggml-vocab-{own.name}").is_file()]
VOCABULARIES = [*OWN, *THEIRS]


@cache
def load(path: Path) -> Tokenizer:
    with GGUF.open(path) as g:
        return Tokenizer.from_gguf(g)


@pytest.fixture(params=VOCABULARIES, ids=lambda path: path.stem)
def real(request: pytest.FixtureRequest) -> Tokenizer:
    return load(request.param)


Build = Callable[..., Tokenizer]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def make(
        model: str, tokens: Sequence[str | bytes], extra: Iterable[bytes] = (), **types: Sequence[int]
    ) -> Tokenizer:
        (tmp_path / "v.gguf").write_bytes(vocabulary(model, tokens, extra=extra, **types))
        with GGUF.open(tmp_path / "v.gguf") as g:
            return Tokenizer.from_gguf(g)

    return make


# ---- vocabularies ----


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_vectors(path: Path) -> None:
    """Of llama.cpp: `tests/data/make_vocabularies.py`."""
    kept, tokenizer = json.loads(path.with_suffix(".json").read_text()), load(path)
    assert len(kept["texts"]) == len(kept["ids"]) == len(kept["parsed"]) > 250
    for text, ids, parsed in zip(kept["texts"], kept["ids"], kept["parsed"], strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, repr(text)
        assert tokenizer.encode(text, parse_special=True) == parsed, repr(text)
        want = text.replace("\u2581", " ") if path == SPM else text
        assert tokenizer.decode(ids, skip_special=False) == want


if THEIRS:

    @pytest.mark.parametrize("path", THEIRS, ids=lambda path: path.stem)
    def test_vectors_of_real_vocabularies(path: Path) -> None:
        texts = Path(f"{path}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
        lines = Path(f"{path}.out").read_text().split("\n")
        assert (texts.pop(), lines.pop()) == ("", "")  # both files end with their separator
        assert len(texts) == len(lines) == 46
        tokenizer = load(path)
        for text, line in zip(texts, lines, strict=True):
            ids = tokenizer.encode(text, add_special=False)
            assert ids == [int(word) for word in line.split()], repr(text)
            assert tokenizer.decode(ids) == text

    def test_special_ids_of_real_vocabularies() -> None:
        spm, bpe, qwen = map(load, THEIRS)
        assert (spm.n_vocab, spm.bos_id, spm.eos_id, spm.add_bos, spm.stop_ids) == (32_000, 1, 2, True, {2})
        assert (bpe.n_vocab, bpe.bos_id, bpe.add_bos) == (128_256, 128_000, True)
        assert bpe.stop_ids == {128_001, 128_009}
        assert (qwen.n_vocab, qwen.add_bos) == (151_936, False) and qwen.stop_ids >= {151_643, 151_645}


def test_prompts_of_the_models(models: Path) -> None:
    for name, case in json.loads((models / "expected.json").read_text()).items():
        tokenizer = load(models / f"{name}.gguf")
        assert tokenizer.encode(case["prompt"]) == case["prompt_tokens"]
        assert tokenizer.decode(case["prompt_tokens"]) == case["prompt"]
        # Generated ids continue a text: llama.cpp's own detokenizer gave these.
        assert tokenizer.decode(case["greedy_tokens"], at_start=False) == case["greedy_text"]


def test_special_ids() -> None:
    spm, bpe, qwen = map(load, OWN)
    assert (spm.n_vocab, spm.bos_id, spm.eos_id, spm.add_bos, spm.stop_ids) == (1963, 1, 2, True, {2})
    assert (bpe.n_vocab, bpe.bos_id, bpe.add_bos) == (2210, 2204, True)
    assert bpe.stop_ids == {2205, 2209}
    assert (qwen.n_vocab, qwen.add_bos, qwen.stop_ids) == (2207, False, {2204, 2206})
    assert bpe.encode("") == [2204] and bpe.encode("", add_special=False) == []


def test_special_tokens_in_text() -> None:
    bpe = load(BYTES)
    text, end = "<|eot_id|>hi<|eot_id|><|eot_id|>", 2209
    ids = bpe.encode(text, add_special=False, parse_special=True)
    assert ids == [end, *bpe.encode("hi", add_special=False), end, end]
    assert bpe.decode(ids) == "hi" and bpe.decode(ids, skip_special=False) == text
    plain = bpe.encode(text, add_special=False)
    assert end not in plain and bpe.decode(plain) == text
    spm = load(SPM)
    after_special = spm.encode("a</s>a", add_special=False, parse_special=True)
    assert after_special == [*spm.encode("a", add_special=False), 2, *spm.encode("a", add_special=False)]


def test_ignore_merges(build: Build) -> None:
    """Llama 3 takes a word that is a token as it is, even where no merges lead to it."""
    tokens = ["a", "b", "c", "ab", "abc"]
    extra = [*bpe_extra(["a b"], "llama-bpe"), key("tokenizer.ggml.bos_token_id", U32, 0)]
    assert build("gpt2", tokens, extra).encode("abc", add_special=False) == [4]
    assert build("gpt2", tokens, bpe_extra(["a b"], "qwen2")).encode("abc") == [3, 2]


def test_round_trip_of_prose(real: Tokenizer, models: Path) -> None:
    text = (models / "stories.txt").read_text()[:50_000]
    ids = real.encode(text)
    assert real.decode(ids) == text
    assert len(ids) < len(text) / 3


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200))
def test_round_trip_of_any_text(text: str) -> None:
    for path in VOCABULARIES:
        tokenizer = load(path)
        # SPM writes a space as U+2581, so the two are one character to it.
        want = text.replace("\u2581", " ") if "spm" in path.stem else text
        assert tokenizer.decode(tokenizer.encode(text)) == want


# ---- merging by score ----


def plain_merge(text: str, ids: dict[str, int], scores: Sequence[float]) -> list[str]:
    """The definition, in quadratic time: the best pair, leftmost among equals, until there is none."""
    symbols = list(text)
    while True:
        pairs = [(ids.get(a + b), i) for i, (a, b) in enumerate(itertools.pairwise(symbols))]
        found = [(-scores[token], i) for token, i in pairs if token is not None]
        if not found:
            return symbols
        i = min(found)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@settings(max_examples=400, deadline=None)
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
    """With scores that tie often, with characters that are no tokens themselves, and with tokens that reach
    over spaces, which are written as "_" above."""
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


def test_words_are_remembered_beside_tokens_that_reach_over_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3 has some; without its words being remembered it took three times the time."""
    merged = list[str]()
    monkeypatch.setattr(SpmMerger, "_merge", lambda self, word: merged.append(word) or [0])
    ids = {text: i for i, text in enumerate(("a", f"a{SPACE}b", f";{SPACE}", f"{SPACE}a"))}
    merger = SpmMerger(ids, [0.0] * 4, range(256))
    merger.encode(SPACE.join(["x", "c", "a", "c", "a", "b", "c;", "", "c", "c"]))
    assert merged == ["x", *(SPACE + w for w in ("c", "a", f"a{SPACE}b", f"c;{SPACE}{SPACE}c"))]


@pytest.mark.parametrize("letter", ["x", SPACE, "\u0301"])
def test_merging_takes_n_log_n_steps(letter: str) -> None:
    """Of one word: sixteen times the text takes sixteen times the calls, not 256."""
    ids = {letter * n: i for i, n in enumerate((1, 2, 3, 4, 8, 16))}
    scores, calls = [-float(i) for i in range(len(ids))], []
    for n in (1_000, 16_000):
        merger = SpmMerger(ids, scores, range(256))
        with counted_calls() as counted:
            merger.encode(letter * n)
        calls.append(counted.total())
    assert 1_000 < calls[0] and calls[1] <= 1.1 * 16 * calls[0]


def test_leftmost_of_equal_scores_is_beyond_ranked_merges() -> None:
    """Why SPM is not run by the tokenizers library: either ranking gets one of the two texts wrong."""
    ids, scores = {"a": 0, "b": 1, "ab": 2, "ba": 3}, [0.0] * 4
    merger = SpmMerger(ids, scores, [0] * 256)
    assert (merger.encode("aba"), merger.encode("bab")) == ([2, 0], [3, 1])
    for merges in ([("a", "b"), ("b", "a")], [("b", "a"), ("a", "b")]):
        ranked = Backend(BPE(vocab=ids, merges=merges))
        assert (ranked.encode("aba").ids, ranked.encode("bab").ids) != ([2, 0], [3, 1])


def test_words_that_are_remembered_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server meets new words for ever: 20 MB for 65,536 of them was too much."""
    merged = {f"{SPACE}{i:x}abcd": [i % 300, 301, 302] for i in range(40_000)}
    monkeypatch.setattr(
        SpmMerger, "_merge", lambda self, word: merged[word].copy()
    )  # merging is not measured
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
    "path", [path for path in VOCABULARIES if "spm" in path.stem], ids=lambda path: path.stem
)
def test_scores_agree_with_ranked_merges(models: Path, path: Path) -> None:
    """The same vocabulary as ranked merges in the tokenizers library: an independent implementation."""
    with GGUF.open(path) as g:
        tokens, scores = g.strings("tokenizer.ggml.tokens"), g.floats("tokenizer.ggml.scores").tolist()
    ids = {t: i for i, t in enumerate(tokens)}
    splits = ((t[:k], t[k:]) for t in tokens for k in range(1, len(t)))
    merges = [(a, b) for a, b in splits if a in ids and b in ids]
    merges.sort(key=lambda m: (-scores[ids[m[0] + m[1]]], ids[m[0]], ids[m[1]]))
    ranked = Backend(BPE(vocab=ids, merges=merges, byte_fallback=True, unk_token="<unk>"))
    ours, rng = load(path), random.Random(0)
    text = (models / "stories.txt").read_text()
    whole = [t for t in tokens if len(t) > 1 and "<0x" not in t]
    for _ in range(300):
        start = rng.randrange(len(text) - 300)
        for case in (text[start : start + 300], "".join(rng.choices(whole, k=8)).replace(SPACE, " ")):
            want = ranked.encode((" " + case).replace(" ", SPACE), add_special_tokens=False).ids
            assert ours.encode(case, add_special=False) == want, repr(case)


# ---- streaming ----


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=80), seed=st.integers(0, 1 << 32), skip=st.booleans(), at_start=st.booleans())
def test_stream_equals_decode(text: str, seed: int, skip: bool, at_start: bool) -> None:
    """For the ids of texts and for random ids, whose bytes are mostly no UTF-8."""
    rng = random.Random(seed)
    for path in VOCABULARIES:
        tokenizer = load(path)
        byte_ids = [i for i in range(300) if len(tokenizer.piece(i)) == 1]
        noise = [rng.choice([rng.randrange(tokenizer.n_vocab), rng.choice(byte_ids)]) for _ in range(40)]
        for ids in (tokenizer.encode(text), noise):
            stream = tokenizer.stream(skip, at_start=at_start)
            parts = [stream.push(i) for i in ids]
            joined = "".join(parts) + stream.flush()
            assert joined == tokenizer.decode(ids, skip, at_start=at_start)
            shown = [i for i in ids if not (skip and tokenizer.is_special(i))]
            raw = b"".join(map(tokenizer.piece, shown))
            if at_start and tokenizer.add_space_prefix:
                raw = raw.removeprefix(b" ")
            assert joined == codecs.decode(raw, "utf-8", "replace")


def test_stream_holds_back_incomplete_characters() -> None:
    tokenizer = load(SPM)
    ids = [3 + b for b in "é🦙".encode()]
    stream = tokenizer.stream(at_start=False)
    assert [stream.push(i) for i in ids] == ["", "é", "", "", "", "🦙"]
    assert stream.push(ids[0]) == "" and stream.flush() == "\ufffd"
    assert stream.push(ids[0]) + stream.push(ids[1]) == "é"


def test_leading_space() -> None:
    tokenizer = load(SPM)
    for text in ("a", " a", "  a", " "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode("a", add_special=False)
    assert (tokenizer.decode(ids), tokenizer.decode(ids, at_start=False)) == ("a", " a")


# ---- bad input ----


@pytest.mark.parametrize("bad", [-1, 1963, 1 << 70, "1", 1.0, None, [1]], ids=repr)
def test_decode_rejects_what_is_no_token(bad: object) -> None:
    tokenizer = load(SPM)
    with pytest.raises(InvalidArgument, match="token id"):
        tokenizer.decode([1, bad])  # type: ignore[list-item]


def test_decode_takes_numpy_integers() -> None:
    tokenizer = load(SPM)
    assert tokenizer.decode(np.array(tokenizer.encode("one two"))) == "one two"


def test_encode_rejects_what_is_no_text(real: Tokenizer) -> None:
    for bad in (b"text", None, 3, "a" * (MAX_TEXT + 1)):
        with pytest.raises(InvalidArgument, match="text"):
            real.encode(bad)  # type: ignore[arg-type]


HOSTILE = {
    "spaces": " " * 100_000,
    "letters": "x" * 100_000,
    "digits": "1" * 100_000,
    "NUL": "\0" * 100_000,
    "marks": "a" + "\u0301" * 100_000,
    "newlines": " \n" * 50_000,
    "specials": "<|eot_id|>" * 10_000,
    "spaces then a word": " " * 100_000 + "x",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text(real: Tokenizer, name: str) -> None:
    """0.6 s at most on two cores; quadratic time takes minutes, which the test's own deadline ends."""
    ids = real.encode(HOSTILE[name], parse_special=True)
    shown = [i for i in ids if i != real.bos_id or not real.add_bos]
    assert real.decode(shown, skip_special=False) == HOSTILE[name]


def test_lone_surrogates(real: Tokenizer) -> None:
    assert real.decode(real.encode("a\ud800b\udfffc")) == "a\ufffdb\ufffdc"
    assert real.decode(real.encode("\ud83e\udd99")) == "🦙"


def byte_tokens() -> list[str]:
    return [f"<0x{b:02X}>" for b in range(256)]


def spm_extra(n: int, scores: Sequence[float] | None = None) -> list[bytes]:
    return [array("tokenizer.ggml.scores", F32, scores if scores is not None else [0.0] * n)]


def test_byte_tokens_of_a_built_vocabulary(build: Build) -> None:
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens(), SPACE, "h", "i"]
    tokenizer = build("llama", tokens, spm_extra(len(tokens)), types=[2, 3, 3, *[6] * 256, 1, 1, 1])
    assert tokenizer.encode("hi!") == [1, 259, 260, 261, 3 + ord("!")]
    assert tokenizer.decode(tokenizer.encode("hi! ü")) == "hi! ü"


def test_user_defined_tokens_always_match_the_longest_first(build: Build) -> None:
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens(), "<x>", "<x><y>", "a", SPACE + "a"]
    types = [2, 3, 3, *[6] * 256, 4, 4, 1, 1]
    tokenizer = build("llama", tokens, spm_extra(len(tokens)), types=types)
    ids = {t: i for i, t in enumerate(tokens)}
    got = tokenizer.encode("a<x><y><x>a</s>", add_special=False)
    tail = [ids[f"<0x{b:02X}>"] for b in b"</s>"]
    assert got == [ids[SPACE + "a"], ids["<x><y>"], ids["<x>"], ids[SPACE + "a"], *tail]


def test_flags_of_the_file(build: Build) -> None:
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens(), "a", "<|im_end|>"]
    extra = [
        *spm_extra(len(tokens)),
        key("tokenizer.ggml.add_eos_token", BOOL, True),
        key("tokenizer.ggml.add_bos_token", BOOL, False),
        key("tokenizer.ggml.add_space_prefix", BOOL, False),
        key("tokenizer.ggml.eot_token_id", U32, 259),
    ]
    tokenizer = build("llama", tokens, extra)
    assert tokenizer.encode("a") == [259, 2] and tokenizer.encode("a", add_special=False) == [259]
    assert tokenizer.stop_ids == {2, 259, 260}


def bpe_extra(merges: Sequence[str | bytes], pre: str = "gpt-2") -> list[bytes]:
    return [array("tokenizer.ggml.merges", STRING, merges), key("tokenizer.ggml.pre", STRING, pre)]


def test_models_without_a_usable_tokenizer(build: Build, tmp_path: Path) -> None:
    for model in ("none", "no_vocab", "plamo2"):
        with pytest.raises(UnsupportedModel, match="no usable tokenizer"):
            build(model, ["a"])
    (tmp_path / "n.gguf").write_bytes(gguf_bytes([key("general.architecture", STRING, "llama")]))
    with GGUF.open(tmp_path / "n.gguf") as g, pytest.raises(UnsupportedModel, match="it has none"):
        Tokenizer.from_gguf(g)
    with pytest.raises(UnsupportedModel, match=r"'klingon' is not known.*qwen2"):
        build("gpt2", ["a"], bpe_extra([], "klingon"))


def test_malformed_vocabularies(build: Build) -> None:
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens()]
    n = len(tokens)
    cases: dict[str, tuple[str, Sequence[str | bytes], list[bytes], Sequence[int] | None]] = {
        "257 entries for 259": ("llama", tokens, spm_extra(257), None),
        "'tokenizer.ggml.token_type' has 1": ("llama", tokens, spm_extra(n), [1]),
        "'tokenizer.ggml.scores' is missing": ("llama", tokens, [], None),
        "NaN": ("llama", tokens, spm_extra(n, [float("nan")] * n), None),
        "is not UTF-8": ("llama", [*tokens[1:], b"\xff\xfe"], spm_extra(n), None),
        "twice": ("llama", [*tokens[1:], "<s>"], spm_extra(n), None),
        "byte token 0": ("llama", tokens, spm_extra(n), [6] * n),
        "'tokenizer.ggml.bos_token_id' is 259": (
            "llama",
            tokens,
            [*spm_extra(n), key("tokenizer.ggml.bos_token_id", U32, n)],
            None,
        ),
        "'tokenizer.ggml.eot_token_id' is -1": (
            "llama",
            tokens,
            [*spm_extra(n), key("tokenizer.ggml.eot_token_id", I32, -1)],
            None,
        ),
        "neither all byte tokens": ("llama", [], spm_extra(0), None),
        "'tokenizer.ggml.merges' is missing": ("gpt2", ["a"], [], None),
        "merge 'a b'": ("gpt2", ["a", "b"], bpe_extra(["a b"]), None),
        "merge 'a c'": ("gpt2", ["a", "b", "ac"], bpe_extra(["a c"]), None),
        "merge 'ab'": ("gpt2", ["a", "b", "ab"], bpe_extra(["ab"]), None),
        "merge 'a b b'": ("gpt2", ["a", "b", "ab"], bpe_extra(["a b b"]), None),
        "bos token is to be added": (
            "gpt2",
            ["a"],
            [*bpe_extra([]), key("tokenizer.ggml.add_bos_token", BOOL, True)],
            None,
        ),
    }
    for words, (model, texts, extra, types) in cases.items():
        with pytest.raises(GGUFError) as e:
            build(model, texts, extra, **({} if types is None else {"types": types}))
        assert words in str(e.value)


def test_duplicate_merges_keep_the_first_rank(build: Build) -> None:
    tokens = ["a", "b", "ab", "ba"]
    assert build("gpt2", tokens, bpe_extra(["a b", "b a", "a b"])).encode("aba") == [2, 0]
    assert build("gpt2", tokens, bpe_extra(["b a", "a b", "b a"])).encode("aba") == [0, 3]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["llama", "gpt2", "gemma4"]),
    st.lists(
        st.one_of(st.text(max_size=4), st.binary(max_size=4), st.sampled_from(byte_tokens())), max_size=12
    ),
    st.lists(st.integers(-2, 9), max_size=12),
    st.text(max_size=30),
)
def test_random_vocabularies_end_in_typed_errors(
    tmp_path_factory: pytest.TempPathFactory, model: str, tokens: list, types: list, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.gguf"
    types = (types + [1] * 12)[: len(tokens)]
    texts = [t.encode("utf-8", "replace") if isinstance(t, str) else t for t in tokens]
    path.write_bytes(vocabulary(model, texts, types=types, extra=[*spm_extra(len(tokens)), *bpe_extra([])]))
    try:
        with GGUF.open(path) as g:
            tokenizer = Tokenizer.from_gguf(g)
        for parse_special in (False, True):
            tokenizer.decode(tokenizer.encode(text, parse_special=parse_special))
    except VkbackendError:
        pass


# ---- pre-tokenizers ----


DISTINCT = sorted({pre: name for name, pre in PRE_TOKENIZERS.items()}.values())
RUNS = (" ", "\n", "\t", "a", "A", "1", "'", "\u0301", "日", " a", "\u3000")


def cuts(name: str, text: str) -> list[str]:
    found = [pre_tokenizers.Split(Regex(p), "isolated") for p in PRE_TOKENIZERS[name].patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(found).pre_tokenize_str(text)]


@pytest.fixture(params=DISTINCT)
def byte_level(request: pytest.FixtureRequest, build: Build) -> Tokenizer:
    """A vocabulary of the 256 bytes and of those merges that show where the pre-tokenizer cuts."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(b) for b in plain] + [chr(0x100 + i) for i in range(256 - len(plain))]
    pairs = ["1 1", "a a", "\u0120 a", "a 1", "\u010a \u010a", "\u0120 \u0120"]
    tokens = [*alphabet, *(p.replace(" ", "") for p in pairs)]
    extra = [*bpe_extra(pairs, request.param), key("tokenizer.ggml.bos_token_id", U32, 0)]
    return build("gpt2", tokens, extra)


def test_pre_tokenizers(byte_level: Tokenizer, request: pytest.FixtureRequest) -> None:
    """Every expression compiles, loses no text, and cuts letters from digits, but for Bloom's words."""
    text = 'aa11 a  \n\n é日本\'S Ünï, 12345\t"x" ー。Ω\u212a\u1f7d'
    assert byte_level.decode(byte_level.encode(text, add_special=False)) == text
    pieces = [byte_level.piece(i) for i in byte_level.encode("a1", add_special=False)]
    bloom = PRE_TOKENIZERS[request.node.callspec.params["byte_level"]] == PRE_TOKENIZERS["bloom"]
    assert pieces == ([b"a1"] if bloom else [b"a", b"1"])
    for run in RUNS:
        for end in ("", "x", "1"):
            long = run * 2_000 + end
            assert byte_level.decode(byte_level.encode(long, add_special=False)) == long


@pytest.mark.parametrize("name", DISTINCT)
def test_cuts_of_long_runs(name: str) -> None:
    """1 s on two cores; \\s+$, which takes quadratic time on spaces before a digit, takes 250 s, and the
    test's own deadline ends it."""
    for run in RUNS:
        assert "".join(cuts(name, run * 200_000 + "1")) == run * 200_000 + "1"


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


# ---- the library underneath ----


def test_silent_after_a_fork() -> None:
    script = """if True:
        import os, sys
        from vkbackend.models.gguf.reader import GGUF
        from vkbackend.models.text.tokenizer import Tokenizer
        tokenizer = Tokenizer.from_gguf(GGUF.open(sys.argv[1]))
        ids = tokenizer.encode("before the fork " * 1000)
        if (pid := os.fork()) == 0:
            os._exit(tokenizer.encode("before the fork " * 1000) != ids)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    path = str(QWEN2)
    done = subprocess.run(
        [sys.executable, "-c", script, path], capture_output=True, env=environment, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
