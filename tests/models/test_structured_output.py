"""Answers follow a schema or grammar on every device, even if unconstrained requests run at the same time."""

from __future__ import annotations

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from device_sets import DEVICE_SETS, QUICKEST, wide
from drafts import Guesses
from scheduling import drafting
from tiny_models import Tiny, write_tiny

from vkbackend.errors import InvalidArgument, VkbackendError
from vkbackend.models import generation_maker
from vkbackend.models.conversation import Chat
from vkbackend.models.engine import engine
from vkbackend.models.llm import LLM
from vkbackend.models.model_tokens import vocabulary_of
from vkbackend.models.placement import traced_steps

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": -99, "maximum": 99}, "name": {"enum": ["a", "\"é'"]}},
    "required": ["x", "name"],
    "additionalProperties": False,
}


SMALL = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema whose values are bounded, because a random model generates the longest allowed text."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "pattern"]
    if depth:
        kinds += ["object", "array", "anyOf", "ref", "object"]
    kind = rng.choice(kinds)
    if kind == "string":
        return {"type": "string", "maxLength": rng.randrange(9), "minLength": 0}
    if kind == "integer":
        low = rng.randrange(-1000, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(500)}
    if kind == "number":
        return {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": rng.randrange(1, 50)}
    if kind == "enum":
        return {
            "enum": rng.sample([1, -2.5, "x", "é\n", None, True, [1, 2], {"a": "b"}], rng.randrange(1, 5))
        }
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-c]{1,4}$", "^(no|yes)-\\d{2}$", "^\\w?$"])}
    if kind == "array":
        low = rng.randrange(3)
        return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": low,
                "maxItems": low + rng.randrange(3)}  # fmt: skip
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
    if kind == "ref":
        return (
            {"$ref": "#/$defs/inner", "$defs": {"inner": random_schema(rng, 0)}}
            if depth == 3
            else {"const": 7}
        )
    if kind == "object":
        names = rng.sample(["a", "b c", "dé", 'e"f', "g"], rng.randrange(4))
        return {"type": "object", "properties": {name: random_schema(rng, depth - 1) for name in names},
                "required": [name for name in names if rng.random() < 0.6],
                "additionalProperties": False}  # fmt: skip
    return {"type": kind}


def check(schema: dict[str, Any], text: str) -> None:
    jsonschema.validate(json.loads(text), schema)


def texts_follow_schemas(path: Path, n: int, seed: int, **options: Any) -> int:
    rng = random.Random(seed)
    ended, at_once = 0, 12
    with LLM(path, n_ctx=600, n_slots=at_once, **options) as llm:
        for begin in range(0, n, at_once):
            schemas = [random_schema(rng) for _ in range(min(at_once, n - begin))]
            streams = [
                llm.stream("Once upon a time", 500, json_schema=schema, temperature=rng.choice([0, 1, 100]),
                           seed=begin + i)
                for i, schema in enumerate(schemas)
            ]  # fmt: skip
            for schema, chunks in zip(schemas, [list(stream) for stream in streams], strict=True):
                assert chunks[-1].finish_reason == "stop", (schema, "".join(c.text for c in chunks))
                check(schema, "".join(chunk.text for chunk in chunks))
                ended += 1
    return ended


def test_random_schemas(models: Path) -> None:
    assert texts_follow_schemas(models / "stories-narrow-Q8_0.gguf", 6, 1, devices=["numpy"]) == 6


@pytest.mark.wide
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["stories-narrow-Q8_0", "stories-narrow-Q4_0"])
def test_many_random_schemas(models: Path, name: str, seed: int) -> None:
    assert texts_follow_schemas(models / f"{name}.gguf", 100, 100 + seed, devices=["numpy"]) == 100


# "0,0,0" splits the vocabulary over three devices of one driver, and "0,1" over two drivers.
@pytest.mark.parametrize("devices", [p if p.id == "0,0" else wide(p) for p in DEVICE_SETS])
def test_masks_on_the_devices_give_the_same_text_as_complete_rows(
    models: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str]
) -> None:
    """Devices apply the mask before top-k. No device's share of the vocabulary is a multiple of 32 tokens,
    and an unconstrained request runs at the same time."""

    def run() -> list[str]:
        with LLM(path, devices=devices, n_ctx=128, n_slots=3, tensor_split=shares) as llm:
            assert bool(llm._mailbox.channel.engine._engine.runner.max_top_k) is on  # type: ignore[union-attr]
            kinds: list[dict[str, Any]] = [
                {"json_schema": POINT}, {"max_tokens": 12}, {"regex": "[a-z]{3}( [a-z]{2}){2}", "temperature":
                0},
            ]  # fmt: skip
            streams = [llm.stream("Once upon", **{"seed": 4, **kind}) for kind in kinds]
            return ["".join(chunk.text for chunk in stream) for stream in streams]

    path, on = models / "stories-narrow-Q8_0.gguf", False
    shares = [5, 4][: len(devices)] if len(devices) == 2 else None
    whole = run()
    monkeypatch.setattr(traced_steps, "TOP_K_VOCAB", 256)
    monkeypatch.setattr(traced_steps, "MAX_TOP_K", 40)
    on = True
    assert run() == whole
    check(POINT, whole[0])
    assert re.fullmatch("[a-z]{3}( [a-z]{2}){2}", whole[2])


@pytest.mark.parametrize("top_k", [wide(pytest.param(0, id="0")), 40])
def test_drafts_give_the_same_answers(models: Path, monkeypatch: pytest.MonkeyPatch, top_k: int) -> None:
    """Half of the drafted tokens are random, so most drafts break the grammar at some token."""
    if top_k:
        monkeypatch.setattr(traced_steps, "TOP_K_VOCAB", 256)
        monkeypatch.setattr(traced_steps, "MAX_TOP_K", top_k)
    kinds: list[dict[str, Any]] = [
        {"json_schema": POINT}, {"regex": "[a-z]{3}( [a-z]{2}){5}", "temperature": 0, "logprobs": 2},
        {"regex": "[a-z]{3}( [a-z]{2}){5}", "repeat_penalty": 1.2}, {"max_tokens": 20},
    ]  # fmt: skip

    def run() -> list[list[tuple[Any, ...]]]:
        with LLM(
            models / "stories-narrow-Q8_0.gguf", devices=QUICKEST, n_ctx=128, speculation="ngram"
        ) as llm:
            streams = [list(llm.stream("Once upon", **{"seed": 4, **kind})) for kind in kinds]
            return [[(c.token, c.text, c.logprobs) for c in stream] for stream in streams]

    monkeypatch.setattr(engine, "speculation_of", lambda runner, draft: None)
    plain = run()
    texts = [[token for token, *_ in stream] for stream in plain]

    drafter = Guesses(lambda want: texts[want.number][len(want.history) - n_prompt :], 0.7, 1, 512)
    with LLM(models / "stories-narrow-Q8_0.gguf", devices=["numpy"], n_ctx=128) as llm:
        n_prompt = len(llm.tokenize("Once upon"))
    monkeypatch.setattr(engine, "speculation_of", lambda runner, draft: drafting(runner, drafter))
    again = run()
    for a, b in zip(plain, again, strict=True):
        assert [x[0] for x in a] == [x[0] for x in b]
    assert again == plain
    assert drafter.n_accepted > 20 and drafter.n_drafted > drafter.n_accepted


def test_many_threads_begin_with_a_grammar(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_vocabulary = vocabulary_of
    monkeypatch.setattr(
        generation_maker, "vocabulary_of", lambda tokenizer: (time.sleep(0.2), slow_vocabulary(tokenizer))[1]
    )
    with LLM(models / "stories-narrow-Q8_0.gguf", devices=["numpy"], n_ctx=64, n_slots=4) as llm:

        def ask(i: int) -> str:
            try:
                return llm.generate("Once", 9, regex="((" if i % 3 == 0 else f"a{{{i + 1}}}", seed=1).text
            except InvalidArgument:
                return ""

        with ThreadPoolExecutor(12) as threads:
            texts = list(threads.map(ask, range(1, 9)))
        assert [len(text) for text in texts] == [0 if i % 3 == 0 else i + 1 for i in range(1, 9)]
        assert llm.generate("Once", 3, temperature=0).text


@pytest.mark.wide
def test_an_engine_in_a_separate_process(models: Path) -> None:
    with LLM(models / "stories-narrow-Q8_0.gguf", devices=["numpy"], n_ctx=256, process=True) as llm:
        check(POINT, llm.generate("Once", 200, json_schema=json.dumps(POINT), seed=1).text)
        assert llm.generate("Once", 50, grammar='root ::= ("a" | "b"){3} "!"', seed=1).text[3:] == "!"
        with pytest.raises(InvalidArgument, match="strin"):
            llm.generate("Once", 50, json_schema={"type": "strin"})
        assert llm.generate("Once", 5, temperature=0).text


@pytest.mark.parametrize("schema", [SMALL, wide(pytest.param(POINT, id="point"))], ids=["small", "point"])
def test_with_every_sampler(models: Path, schema: dict[str, Any]) -> None:
    kinds: list[dict[str, Any]] = [
        {"mirostat": 2}, {"repeat_penalty": 1.5, "repeat_last_n": -1}, {"dry_multiplier": 1.0},
        {"typical_p": 0.5}, {"xtc_probability": 1.0}, {"top_n_sigma": 1.0}, {"dynatemp_range": 0.5},
        {"logits_processors": [lambda tokens, logits: -logits]}, {"logit_bias": {300: 50.0}},
        {"ignore_eos": True}, {"min_tokens": 30}, {"logprobs": 3}, {"temperature": 0}, {"top_k": 1},
    ]  # fmt: skip
    with LLM(models / "stories-narrow-Q8_0.gguf", devices=["numpy"], n_ctx=256, n_slots=len(kinds)) as llm:
        streams = [llm.stream("Once", 200, json_schema=schema, seed=1, **kind) for kind in kinds]
        for kind, chunks in zip(kinds, map(list, streams), strict=True):
            assert chunks[-1].finish_reason == "stop", kind
            check(schema, "".join(chunk.text for chunk in chunks))
            assert all(("logprobs" in kind) == (chunk.logprobs is not None) for chunk in chunks), kind


def test_an_end_that_the_grammar_allows_is_the_models_end_token(models: Path) -> None:
    with LLM(models / "stories-narrow-Q8_0.gguf", devices=["numpy"], n_ctx=128) as llm:
        eos = next(iter(llm.tokenizer.stop_ids))
        may = llm.generate("Once", 50, regex="[a-z]*", logit_bias={eos: 100.0}, seed=1)
        assert (may.finish_reason, may.tokens) == ("stop", [eos])
        must = llm.generate("Once", 50, regex="[a-z]{2}", seed=1)
        assert must.finish_reason == "stop" and eos not in must.tokens and len(must.text) == 2
        cut = llm.generate("Once", 5, regex="[a-z]{100}", seed=1)
        assert cut.finish_reason == "length"


def test_a_failing_grammar_is_an_error_of_its_request_only(models: Path) -> None:
    """The request's logit bias forbids all tokens that its grammar allows."""
    with LLM(models / "stories-narrow-Q8_0.gguf", devices=["numpy"], n_ctx=128, n_slots=2) as llm:
        other = llm.stream("Once", 30, temperature=0)
        first = next(other).text
        digits = {i: -np.inf for i in range(512) if llm.tokenizer.piece(i)[-1:].isdigit()}
        with pytest.raises(VkbackendError, match=r"logit_bias|grammar"):
            llm.generate("Once", 50, regex="[0-9]{3}", logit_bias=digits)
        rest = first + "".join(chunk.text for chunk in other)
        assert rest == llm.generate("Once", 30, temperature=0).text


def test_other_requests_continue_while_a_grammar_is_compiled(models: Path) -> None:
    slow = {"type": "integer", "multipleOf": 9973, "minimum": 0, "maximum": 99_999}
    many = {"properties": {f"p{i}": {"type": "string"} for i in range(1200)}, "required": ["p1"]}
    with LLM(models / "stories-narrow-Q8_0.gguf", devices=["numpy"], n_ctx=400, n_slots=2) as llm:
        waits = llm.stream("Once", 1, json_schema=many)
        late = llm.stream("Once", 3, json_schema={**many, "title": "late"}, deadline_s=0.0)
        gone = llm.stream("Once", 3, json_schema={**many, "title": "gone"})
        assert llm.generate("Once", 5, temperature=0).text
        gone.close()
        with pytest.raises(VkbackendError):
            list(late)
        assert len(list(waits)) == 1
        assert json.loads(llm.generate("Once", 60, json_schema=slow, seed=1, temperature=0).text) % 9973 == 0
        assert llm.stats()["n_waiting"] == 0 and llm.stats()["n_running"] == 0


def test_a_conversation_with_a_schema(models: Path) -> None:
    with LLM(models / "stories-narrow-Q8_0.gguf", devices=["numpy"], n_ctx=256) as llm:
        chat = Chat(llm, template="{% for m in messages %}{{ m.content }}{% endfor %}")
        check(POINT, "".join(chunk.text for chunk in chat.send("Hi", 100, json_schema=POINT, seed=2)))


def test_a_grammar_needs_a_tokenizer(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", Tiny("llama"))
    with LLM(path, devices=["numpy"], n_ctx=64) as llm, pytest.raises(VkbackendError, match="tokenizer"):
        llm.generate([1, 2], 5, regex="a")
