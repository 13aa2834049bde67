from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from gguf_files import BOOL, I32, STRING, U32, gguf_bytes, key, vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import examples
from vocabularies import (
    Build,
    bpe_extra,
    byte_tokens,
    spm_extra,
)

from vkbackend.errors import GGUFError, UnsupportedModel, VkbackendError
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.tokenizer import Tokenizer
from vkbackend.models.text.vocabulary import SPACE


def test_ignore_merges(build: Build) -> None:
    """Llama 3 encodes a word as its own token even if no merges produce this token."""
    tokens = ["a", "b", "c", "ab", "abc"]
    extra = [*bpe_extra(["a b"], "llama-bpe"), key("tokenizer.ggml.bos_token_id", U32, 0)]
    assert build("gpt2", tokens, extra).encode("abc", add_special=False) == [4]
    assert build("gpt2", tokens, bpe_extra(["a b"], "qwen2")).encode("abc") == [3, 2]


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


@settings(max_examples=examples(150), deadline=None)
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
