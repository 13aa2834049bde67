"""The sequence breakers of DRY become the same tokens as in llama.cpp, for real vocabularies."""

from importlib.util import find_spec

import numpy as np
import pytest
from places import DATA

from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.sampling.breakers import breaker_tokens
from vkbackend.models.sampling.penalties import dry_penalties
from vkbackend.models.text.tokenizer import Tokenizer

pytestmark = pytest.mark.no_vulkan

TEXTS = ["\n", ":", '"', "*", "e the", "ing."]


def tokenizer_of(name: str) -> Tokenizer:
    with GGUF.open(DATA / "vocab" / f"{name}.gguf") as gguf:
        return Tokenizer.from_gguf(gguf)


def sequences_of(tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    pieces = [tokenizer.piece(token) for token in range(tokenizer.n_vocab)]
    return breaker_tokens(TEXTS, pieces, lambda text: tokenizer.encode(text, add_special=False))


@pytest.mark.parametrize("name", ["llama-spm", "qwen2"])
def test_every_sequence_writes_a_breaker(name: str) -> None:
    tokenizer = tokenizer_of(name)
    sequences = sequences_of(tokenizer)
    assert any(len(sequence) > 1 for sequence in sequences)
    texts = [text.replace(" ", "") for text in TEXTS]
    for sequence in sequences:
        raw = b"".join(tokenizer.piece(token) for token in sequence).replace(b" ", b"")
        assert any(text.encode() in raw for text in texts)
    alone = {sequence[0] for sequence in sequences if len(sequence) == 1}
    pieces = {token: tokenizer.piece(token) for token in range(tokenizer.n_vocab)}
    assert alone == {token for token, piece in pieces.items() if any(x.encode() in piece for x in TEXTS)}


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["llama-spm", "qwen2"])
def test_llama_cpp_finds_the_same(name: str) -> None:
    """The penalty depends on the length of a repetition, so it shows which tokens are breakers in
    llama.cpp."""
    if find_spec("xllamacpp") is None:
        pytest.skip("needs xllamacpp")
    from oracles import llama_cpp, llama_samplers

    tokenizer = tokenizer_of(name)
    sequences = sequences_of(tokenizer)
    breakers: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in sequences:
        breakers.setdefault(first, []).append(tuple(rest))
    vocabulary = llama_cpp.Vocabulary(DATA / "vocab" / f"{name}.gguf")
    rng, n_penalized = np.random.default_rng(0), 0
    long = [sequence for sequence in sequences if len(sequence) > 1]
    for i in range(60):
        before, *after = rng.integers(300, 1900, 4).tolist()
        among = long if i % 2 else sequences
        history = [before, *among[rng.integers(len(among))], *after] * 2
        theirs = llama_samplers.dry_of_texts(vocabulary, tokenizer.n_vocab, TEXTS, history)
        assert dry_penalties(history, 0.8, 1.75, 2, breakers) == pytest.approx(theirs, rel=1e-5)
        n_penalized += bool(theirs)
    vocabulary.close()
    assert n_penalized > 40
