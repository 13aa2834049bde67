import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_runner
import numpy as np
import pytest
from fake_runner import continuation, row_of
from gguf_files import F32, array, vocabulary

from vkbackend import LLM
from vkbackend.errors import InvalidArgument
from vkbackend.models.sampling.logprobs import logprobs_of

pytestmark = pytest.mark.no_vulkan

TOKENS = ["<unk>", "<s>", "</s>", *(f"\u2581w{i}." for i in range(37))]
TYPES = [2, 3, 3, *[1] * 37]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(sys.modules, "vkbackend.models.engine.runner.runner", fake_runner.MODULE)
    path = tmp_path / "words.gguf"
    extra = [array("tokenizer.ggml.scores", F32, [0.0] * len(TOKENS))]
    path.write_bytes(vocabulary("llama", TOKENS, types=TYPES, extra=extra))
    return path


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, n_ctx=64) as opened:
        yield opened


def test_logprobs_of_every_token(llm: LLM) -> None:
    prompt = [1, 9]
    plain = llm.generate(prompt, 6, **GREEDY)
    done = llm.generate(prompt, 6, logprobs=3, **GREEDY)
    assert done.tokens == plain.tokens and plain.logprobs is None
    assert done.logprobs == [
        logprobs_of(row_of([*prompt, *done.tokens[:i]]), token, 3) for i, token in enumerate(done.tokens)
    ]
    streamed = [chunk.logprobs for chunk in llm.stream(prompt, 6, logprobs=0, **GREEDY)]
    assert [logprob.logprob for logprob in streamed if logprob] == [
        logprob.logprob for logprob in done.logprobs
    ]
    assert all(logprob is not None and logprob.top == () for logprob in streamed)


def test_other_requests_get_no_logprobs(model: Path) -> None:
    with LLM(model, n_ctx=64, n_slots=2) as llm:
        asked, other = llm.stream([1, 9], 8, logprobs=1, **GREEDY), llm.stream([1, 8], 8, **GREEDY)
        pairs = list(zip(asked, other, strict=True))
    assert all(a.logprobs is not None and b.logprobs is None for a, b in pairs)


def test_prompt_logprobs(llm: LLM) -> None:
    prompt = [1, 9, 4, 30]
    done = llm.generate(prompt, 2, prompt_logprobs=2, **GREEDY)
    rows = [row_of(prompt[:i]) for i in range(1, 4)]
    expected = [logprobs_of(row, token, 2) for row, token in zip(rows, prompt[1:], strict=True)]
    assert done.prompt_logprobs == [None, *expected]
    assert done.tokens == continuation(prompt, 2, [2]) and done.logprobs is None


def test_echo(llm: LLM) -> None:
    plain = llm.generate("w1. w2.", 3, **GREEDY)
    echoed = llm.generate("w1. w2.", 3, echo=True, **GREEDY)
    assert echoed.text == "w1. w2." + plain.text and echoed.tokens == plain.tokens
    assert llm.generate([1, 3, 4], 0, echo=True).text == "<s> w0. w1."
    first, *rest = llm.stream("w1.", 2, echo=True, **GREEDY)
    assert (first.text, first.token, first.prompt_logprobs) == ("w1.", None, None) and len(rest) == 2


def test_processors_change_the_chosen_tokens(model: Path, llm: LLM) -> None:
    def never_7(tokens: list[int], logits: np.ndarray) -> np.ndarray:
        assert tokens[:2] == [1, 9]
        logits[7] = -np.inf
        return logits

    options: dict[str, Any] = {"temperature": 0, "logits_processors": [never_7]}
    assert llm.generate([1, 9], 20, ignore_eos=True, **options).tokens == continuation([1, 9], 20, [2, 7])
    with LLM(model, n_ctx=64) as apart:
        apart._maker._apart = True  # process=True sets this attribute
        with pytest.raises(InvalidArgument, match="process=False"):
            apart.generate([1, 9], 1, **options)


@pytest.mark.parametrize(
    "wrong", [{"logprobs": -1}, {"logprobs": 1025}, {"prompt_logprobs": 1.5}, {"echo": "yes"}], ids=repr
)
def test_wrong_values_are_named(llm: LLM, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        llm.generate([1], 1, **wrong)


def test_asyncio_and_batches_give_the_same_logprobs(llm: LLM) -> None:
    options: dict[str, Any] = {**GREEDY, "logprobs": 1, "prompt_logprobs": 1, "echo": True}
    prompts = [[1, 9, 4], [1, 8]]
    alone = [llm.generate(prompt, 3, **options) for prompt in prompts]

    async def streamed() -> list[Any]:
        return [chunk async for chunk in llm.astream(prompts[0], 3, **options)]

    expected = [(answer.text, answer.tokens, answer.logprobs, answer.prompt_logprobs) for answer in alone]
    for done in (llm.generate(prompts, 3, **options), asyncio.run(llm.agenerate(prompts, 3, **options))):
        assert [
            (answer.text, answer.tokens, answer.logprobs, answer.prompt_logprobs) for answer in done
        ] == expected
    first, *rest = asyncio.run(streamed())
    assert (first.text, first.prompt_logprobs) == ("<s> w6. w1.", alone[0].prompt_logprobs)
    assert [chunk.logprobs for chunk in rest] == alone[0].logprobs
