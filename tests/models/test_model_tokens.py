import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_runner
import pytest
from fake_runner import continuation, row_of
from gguf_files import F32, I32, array, gguf_bytes, key, vocabulary

from vkbackend import LLM
from vkbackend.errors import InvalidArgument, UnsupportedModel
from vkbackend.models.generate_options import GenerateOptions
from vkbackend.models.model_tokens import ModelTokens
from vkbackend.models.sampling.breakers import breaker_tokens

pytestmark = pytest.mark.no_vulkan

TOKENS = ["<unk>", "<s>", "</s>", "<0x0A>", "<0xE2>", *(f"\u2581w{i}:" for i in range(10)), "a:\u2581b"]
TYPES = [2, 3, 3, 6, 6, *[1] * 11]
GREEDY: dict[str, Any] = {"temperature": 0}


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setitem(sys.modules, "vkbackend.models.engine.runner.runner", fake_runner.MODULE)
    extra = [
        array("tokenizer.ggml.scores", F32, [0.0] * len(TOKENS)),
        array("tokenizer.ggml.suppress_tokens", I32, [7, 9]),
    ]
    path = tmp_path / "words.gguf"
    path.write_bytes(vocabulary("llama", TOKENS, types=TYPES, extra=extra))
    with LLM(path, n_ctx=64) as opened:
        yield opened


def prompt_to(token: int) -> list[int]:
    return next([1, a, b] for a in range(40) for b in range(40) if row_of([1, a, b]).argmax() == token)


def test_suppressed_tokens_are_never_written(llm: LLM) -> None:
    for token in (7, 9):
        prompt = prompt_to(token)
        want = continuation(prompt, 12, [7, 9, 2])
        assert continuation(prompt, 1) == [token] != want[:1]
        assert llm.generate(prompt, 12, ignore_eos=True, **GREEDY).tokens == want
        assert llm.generate(prompt, 12, ignore_eos=True, logit_bias={token: 5}, **GREEDY).tokens == want


def test_ends(llm: LLM) -> None:
    prompt = prompt_to(2)
    assert llm.generate(prompt, 9, **GREEDY).tokens == [2]
    without = continuation(prompt, 9, [2, 7, 9])
    assert llm.generate(prompt, 9, ignore_eos=True, **GREEDY).tokens == without
    third = without.index(without[2])
    named = llm.generate(prompt, 9, ignore_eos=True, stop_token_ids=[without[2]], **GREEDY)
    assert named.tokens == without[: third + 1] and named.finish_reason == "stop"
    # stop_token_ids allows an end token although ignore_eos forbids end tokens
    assert llm.generate(prompt, 9, ignore_eos=True, stop_token_ids=[2], **GREEDY).tokens == [2]


def test_min_tokens(llm: LLM) -> None:
    prompt, out = prompt_to(2), []
    for i in range(30):
        out += continuation([*prompt, *out], 1, [7, 9, *([2] if i < 3 else [])])
        if out[-1] == 2:
            break
    assert len(out) > 3
    assert llm.generate(prompt, 30, min_tokens=3, **GREEDY).tokens == out


def test_ids_outside_the_vocabulary(llm: LLM) -> None:
    for options in ({"logit_bias": {50: 1}}, {"stop_token_ids": [50]}):
        with pytest.raises(InvalidArgument, match=r"token id 50 .*ids 0\.\.49"):
            llm.generate([1], 1, **options)


def test_everything_forbidden_is_an_error(llm: LLM) -> None:
    with pytest.raises(Exception, match="forbid every token"):
        llm.generate([1], 1, logit_bias={token: -math.inf for token in range(50)})


def test_breakers_become_tokens(llm: LLM) -> None:
    options = llm._maker._tokens.resolved(GenerateOptions(dry_multiplier=1.0), 50)
    assert set(options.dry_sequence_breakers) == {(3,), *((i,) for i in range(5, 16))}
    off = llm._maker._tokens.resolved(GenerateOptions(), 50)
    assert off.dry_sequence_breakers == ()


def test_a_breaker_may_begin_in_one_token_and_end_in_others() -> None:
    pieces = [b"x", b"a:", b": b", b":", b" b", b"y: bz", b"::"]
    codes = {" b": [4], "b": [8]}
    breakers = breaker_tokens([": b"], pieces, lambda rest: codes[rest])
    assert set(breakers) == {(1, 4), (2,), (3, 4), (5,), (6, 4)}


def test_breakers_without_a_tokenizer() -> None:
    alone = ModelTokens(frozenset([5]), frozenset(), None)
    assert alone.resolved(GenerateOptions(dry_multiplier=1.0), 50).dry_sequence_breakers == ()
    ids = alone.resolved(GenerateOptions(dry_multiplier=1.0, dry_sequence_breakers=[[3], [4, 5]]), 50)
    assert ids.dry_sequence_breakers == ((3,), (4, 5))
    with pytest.raises(UnsupportedModel, match="no usable tokenizer"):
        alone.resolved(GenerateOptions(dry_multiplier=1.0, dry_sequence_breakers=["."]), 50)


def test_a_file_without_a_tokenizer_suppresses_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vkbackend.models.engine.runner.runner", fake_runner.MODULE)
    path = tmp_path / "ids.gguf"
    keys = [key("general.architecture", 8, "llama"), array("tokenizer.ggml.suppress_tokens", I32, [7])]
    path.write_bytes(gguf_bytes(keys))
    with LLM(path, n_ctx=64) as opened:
        prompt = prompt_to(7)
        assert opened.generate(prompt, 3, **GREEDY).tokens == continuation(prompt, 3, [7])
