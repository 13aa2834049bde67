"""Tokenizers return the ids of test vectors, for streams and hostile texts too."""

from __future__ import annotations

import codecs
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from device_sets import only, product, wide
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import examples
from vocabularies import (
    BYTES,
    OWN,
    QWEN2,
    SPM,
    THEIRS,
    load,
)

from vkbackend.errors import InvalidArgument
from vkbackend.models.text.tokenizer import MAX_TEXT, Tokenizer

# ---- vocabularies ----


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_vectors(path: Path) -> None:
    kept, tokenizer = json.loads(path.with_suffix(".json").read_text(encoding="utf-8")), load(path)
    assert len(kept["texts"]) == len(kept["ids"]) == len(kept["parsed"]) > 250
    for text, ids, parsed in zip(kept["texts"], kept["ids"], kept["parsed"], strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, repr(text)
        assert tokenizer.encode(text, parse_special=True) == parsed, repr(text)
        want = text.replace("\u2581", " ") if path == SPM else text
        assert tokenizer.decode(ids, skip_special=False) == want


EVERY = pytest.mark.parametrize(
    "paths", [pytest.param(OWN, id="own"), *([wide(pytest.param(THEIRS, id="theirs"))] if THEIRS else [])]
)

if THEIRS:

    @pytest.mark.wide
    @pytest.mark.parametrize("path", THEIRS, ids=lambda path: path.stem)
    def test_vectors_of_real_vocabularies(path: Path) -> None:
        texts = Path(f"{path}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
        lines = Path(f"{path}.out").read_text(encoding="utf-8").split("\n")
        assert (texts.pop(), lines.pop()) == ("", "")
        assert len(texts) == len(lines) == 46
        tokenizer = load(path)
        for text, line in zip(texts, lines, strict=True):
            ids = tokenizer.encode(text, add_special=False)
            assert ids == [int(word) for word in line.split()], repr(text)
            assert tokenizer.decode(ids) == text

    @pytest.mark.wide
    def test_special_ids_of_real_vocabularies() -> None:
        spm, bpe, qwen = map(load, THEIRS)
        assert (spm.n_vocab, spm.bos_id, spm.eos_id, spm.add_bos, spm.stop_ids) == (32_000, 1, 2, True, {2})
        assert (bpe.n_vocab, bpe.bos_id, bpe.add_bos) == (128_256, 128_000, True)
        assert bpe.stop_ids == {128_001, 128_009}
        assert (qwen.n_vocab, qwen.add_bos) == (151_936, False) and qwen.stop_ids >= {151_643, 151_645}


def test_prompts_of_the_models(models: Path) -> None:
    for name, case in json.loads((models / "expected.json").read_text(encoding="utf-8")).items():
        tokenizer = load(models / f"{name}.gguf")
        assert tokenizer.encode(case["prompt"]) == case["prompt_tokens"]
        assert tokenizer.decode(case["prompt_tokens"]) == case["prompt"]
        # Generated ids continue a text, so no space is removed at their start.
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


def test_round_trip_of_prose(real: Tokenizer, models: Path) -> None:
    text = (models / "stories.txt").read_text(encoding="utf-8")[:50_000]
    ids = real.encode(text)
    assert real.decode(ids) == text
    assert len(ids) < len(text) / 3


@EVERY
@settings(max_examples=examples(60), deadline=None)
@given(text=st.text(max_size=200))
def test_round_trip_of_any_text(paths: list[Path], text: str) -> None:
    for path in paths:
        tokenizer = load(path)
        # SPM encodes a space as U+2581, so it decodes each U+2581 as a space.
        want = text.replace("\u2581", " ") if "spm" in path.stem else text
        assert tokenizer.decode(tokenizer.encode(text)) == want


# ---- streaming ----


@EVERY
@settings(max_examples=examples(40), deadline=None)
@given(text=st.text(max_size=80), seed=st.integers(0, 1 << 32), skip=st.booleans(), at_start=st.booleans())
def test_stream_equals_decode(paths: list[Path], text: str, seed: int, skip: bool, at_start: bool) -> None:
    """Decode random ids, which are rarely valid UTF-8."""
    rng = random.Random(seed)
    for path in paths:
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
def test_decode_rejects_invalid_tokens(bad: object) -> None:
    tokenizer = load(SPM)
    with pytest.raises(InvalidArgument, match="token id"):
        tokenizer.decode([1, bad])  # type: ignore[list-item]


def test_decode_takes_numpy_integers() -> None:
    tokenizer = load(SPM)
    assert tokenizer.decode(np.array(tokenizer.encode("one two"))) == "one two"


def test_encode_rejects_other_types(real: Tokenizer) -> None:
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


HOSTILE_CASES = product([pytest.param(path, id=path.stem) for path in [*OWN, *THEIRS]], HOSTILE)
# "spaces then a word" includes the steps of "spaces". llama-bpe and qwen2 merge tokens in the same way.
QUICK = [f"{SPM.stem}-{name}" for name in HOSTILE if name != "spaces"] + [
    f"{BYTES.stem}-{name}" for name in HOSTILE
]


@pytest.mark.parametrize(("path", "name"), only(HOSTILE_CASES, *QUICK))
def test_hostile_text(path: Path, name: str) -> None:
    real = load(path)
    ids = real.encode(HOSTILE[name], parse_special=True)
    shown = [i for i in ids if i != real.bos_id or not real.add_bos]
    assert real.decode(shown, skip_special=False) == HOSTILE[name]


def test_lone_surrogates(real: Tokenizer) -> None:
    assert real.decode(real.encode("a\ud800b\udfffc")) == "a\ufffdb\ufffdc"
    assert real.decode(real.encode("\ud83e\udd99")) == "🦙"


# ---- errors of the library ----


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
