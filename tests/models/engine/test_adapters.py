"""Requests with different adapters share batches but no cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import DENSE, Pairs, merged, random_pairs, write_adapter
from device_sets import nmse
from oracles.fixture import PROMPT, Fixture, write
from oracles.fixtures import build
from oracles.heads import with_head
from runners import F32, load_runner
from scheduling import GREEDY, drafting, finish, tokens_of

from vkbackend import LLM
from vkbackend.errors import InvalidArgument, StateError
from vkbackend.meta.step_kind import Wanted
from vkbackend.models.drafting.drafter import Draft
from vkbackend.models.engine.cache import prefix_tree
from vkbackend.models.engine.cache.mark import (
    EVERYWHERE,
    AdapterUse,
    adapters_at,
    block_mark,
    last_occurrence,
    n_alike,
    next_start,
)
from vkbackend.models.engine.drafters import drafters_of
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Generate
from vkbackend.models.engine.runner.micro_batch import MicroBatch
from vkbackend.step import Run

pytestmark = pytest.mark.no_vulkan

OPTIONS: dict[str, Any] = {"n_ctx": 192, "n_slots": 3, "devices": ["numpy"], **F32}
LONG = (PROMPT * 2)[:70]
CHOICES: list[dict[str, float]] = [{}, {"a": 1.0}, {"b": 0.5}, {"a": 1.0, "b": -0.25}]
INVOCATION = (3, 1, 4)


class Files:
    def __init__(self, folder: Path) -> None:
        self.fixture: Fixture = build("qwen3")
        self.model = write(self.fixture, folder / "model.gguf")
        self.pairs: list[Pairs] = [random_pairs(self.fixture, rank, DENSE) for rank in (4, 6)]
        self.lora = {
            name: write_adapter(folder / f"{name}.gguf", "qwen3", pairs)
            for name, pairs in zip("ab", self.pairs, strict=True)
        }
        self.activated = write_adapter(
            folder / "activated.gguf", "qwen3", self.pairs[0], invocation=INVOCATION
        )
        self.folder = folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def cold(files: Files) -> list[list[int]]:
    answers = []
    for i, choice in enumerate(CHOICES):
        chosen = [(files.pairs["ab".index(name)], scale) for name, scale in choice.items()]
        path = write(merged(files.fixture, chosen), files.folder / f"merged{i}.gguf")
        with LLM(path, **OPTIONS) as llm:
            answers.append(llm.generate(LONG, 6, temperature=0).tokens)
    assert len({tuple(tokens) for tokens in answers}) == len(CHOICES)
    return answers


@pytest.fixture
def llm(files: Files) -> Iterator[LLM]:
    with LLM(files.model, lora=files.lora, lora_init_without_apply=True, **OPTIONS) as opened:
        yield opened


def answer(llm: LLM, choice: dict[str, float], **options: Any) -> tuple[list[int], int]:
    done = llm.generate(LONG, 6, temperature=0, lora=choice, **options)
    return done.tokens, int(done.timings["prompt_n"])


def test_two_adapters_and_none_in_one_batch(llm: LLM, cold: list[list[int]]) -> None:
    streams = [llm.stream(LONG, 6, temperature=0, lora=choice) for choice in CHOICES[:3]]
    tokens: list[list[int]] = [[], [], []]
    for chunks in zip_longest(*streams):
        for so_far, chunk in zip(tokens, chunks, strict=True):
            so_far += [chunk.token] if chunk else []
    assert tokens == cold[:3]


def shared_wrongly(llm: LLM, cold: list[list[int]]) -> list[dict[str, float]]:
    """Return the choices whose answer changes if requests with other adapters run before."""
    return [c for c, want in zip(CHOICES, cold, strict=True) if answer(llm, c)[0] != want]


def test_a_prefix_is_shared_only_by_requests_with_equal_adapters(llm: LLM, cold: list[list[int]]) -> None:
    assert not shared_wrongly(llm, cold)
    for choice, want in reversed(list(zip(CHOICES, cold, strict=True))):
        tokens, n_computed = answer(llm, choice)
        assert tokens == want and n_computed <= len(LONG) - 64  # at least two blocks of 32 are cached
    tokens, n_computed = answer(llm, {"a": 0.0, "b": 0.0})  # a scale of 0 means no adapter
    assert tokens == cold[0] and n_computed <= len(LONG) - 64


@pytest.mark.wide
def test_the_test_above_fails_without_the_key(
    llm: LLM, cold: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_tree, "block_mark", lambda *_: ())
    assert shared_wrongly(llm, cold)


@pytest.mark.wide
def test_drafts_are_verified_with_the_adapters(files: Files, cold: list[list[int]]) -> None:
    """Prompts that repeat themselves get drafts, which a step of several rows verifies."""
    repeated, answers = LONG[:6] * 8, []
    for more in ({}, {"speculation": "ngram"}):
        with LLM(files.model, lora=files.lora, lora_init_without_apply=True, **OPTIONS, **more) as llm:
            answers.append([llm.generate(repeated, 12, temperature=0, lora=c).tokens for c in CHOICES[::3]])
    assert answers[0] == answers[1]


def recorded(draft: Callable[..., list[Draft]], asked: list[list[Draft]]) -> Callable[..., list[Draft]]:
    def draft_and_record(wants: Any) -> list[Draft]:
        asked.append(draft(wants))
        return asked[-1]

    return draft_and_record


@pytest.mark.wide
def test_a_head_drafts_with_the_adapters(tmp_path: Path) -> None:
    """The head's layer is adapted too. The head's logits equal the merged model's logits, and the text is the
    same as without drafts."""
    fixture = with_head("glm4moe")
    pairs = random_pairs(fixture, 4, DENSE)
    lora = {"a": write_adapter(tmp_path / "a.gguf", "glm4moe", pairs)}
    assert any(name.startswith(f"blk.{fixture.n_layer}.") for name in pairs)
    path, other = tmp_path / "model.gguf", tmp_path / "merged.gguf"
    write(fixture, path)
    write(merged(fixture, [(pairs, 0.5)]), other)
    adapted = {"lora": lora, "lora_init_without_apply": True}
    use, logits, texts, drafted = ((0, 0.5),), [], [], []
    for file, more in (
        (path, adapted | {"speculation": "mtp"}),
        (other, {"speculation": "mtp"}),
        (path, adapted),
    ):
        runner = load_runner(file, **OPTIONS | more)
        of_row = use if runner.adapters else ()
        if runner.model.n_ahead:
            runner.step(PROMPT[:12], [Run(1, 0, 12, 0, adapters=of_row)], [])
            rows = MicroBatch([PROMPT[12]], [Run(1, 0, 1, 12, adapters=of_row)], range(1))
            logits.append(runner.collect(runner.launch(rows, Wanted(ahead=True)))[1].copy())
        drafters = drafters_of(runner)
        drafts = drafting(runner, *drafters)
        for drafter in drafters:
            asked: list[list[Draft]] = []
            drafter.draft = recorded(drafter.draft, asked)  # type: ignore[method-assign]
            drafted.append(asked)
        engine = Engine(runner, speculation=drafts)
        answers = finish(engine, [Generate(0, tuple(PROMPT[:12]), 16, GREEDY, adapters=of_row)])
        texts.append(tokens_of(answers[0]))
        engine.close()
    assert nmse(logits[0], logits[1]) < 1e-11
    assert texts[0] == texts[1] == texts[2] and drafted[0] == drafted[1] and len(drafted[0]) > 4


def test_a_named_slot_is_not_continued_with_other_adapters(llm: LLM, cold: list[list[int]]) -> None:
    for choice, want in zip(CHOICES, cold, strict=True):
        tokens, n_computed = answer(llm, choice, slot=0)
        assert (tokens, n_computed) == (want, len(LONG))
        assert answer(llm, choice, slot=0) == (want, 1)


def test_logits_and_log_probabilities(llm: LLM, files: Files) -> None:
    want = {}
    for name, scale in ((None, 0.0), ("a", 1.0)):
        chosen = [(files.pairs[0], scale)] if name else []
        with LLM(write(merged(files.fixture, chosen), files.folder / "m.gguf"), **OPTIONS) as other:
            want[name] = other.logits(LONG)
    assert nmse(llm.logits(LONG), want[None]) < 1e-11
    assert nmse(llm.logits(LONG, lora={"a": 1}), want["a"]) < 1e-11
    done = llm.generate(LONG, 1, temperature=0, prompt_logprobs=0, lora={"a": 1})
    assert done.prompt_logprobs and done.prompt_logprobs[1]
    row = want["a"][0].astype(np.float64)
    assert done.prompt_logprobs[1].logprob == pytest.approx(
        row[LONG[1]] - np.log(np.exp(row - row.max()).sum()) - row.max(), abs=1e-4
    )


def test_default_scales(llm: LLM, cold: list[list[int]]) -> None:
    def default() -> list[int]:
        return llm.generate(LONG, 6, temperature=0).tokens

    assert default() == cold[0]
    llm.set_adapters({"a": 1.0, 1: -0.25})
    assert default() == cold[3] and [a["scale"] for a in llm.adapters] == [1.0, -0.25]
    assert answer(llm, {})[0] == cold[0]  # {} means no adapter, whatever the defaults are
    llm.set_adapters([("b", 0.5)])  # adapters that are not listed get 0
    assert default() == cold[2] and [a["scale"] for a in llm.adapters] == [0.0, 0.5]
    llm.set_adapters({})
    assert default() == cold[0]


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"c": 1.0}, "0 \\(a\\), 1 \\(b\\)"),
        ({2: 1.0}, "unknown"),
        ([("a", 1.0), (0, 2.0)], "twice"),
        ({"a": float("inf")}, "finite"),
        ({"a": 2e6}, "scale"),
        ({1.5: 1.0}, "whole number"),
        ([("a",)], "pairs"),
        ("a", "dict of scales"),
    ],
)
def test_bad_choices_are_refused(llm: LLM, lora: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        llm.generate(LONG, 1, lora=lora)
    with pytest.raises(InvalidArgument, match=words):
        llm.set_adapters(lora)
    assert len(llm.generate(LONG, 1).tokens) == 1


def test_at_most_four_adapters_are_active(files: Files) -> None:
    five = {str(i): files.lora["a"] for i in range(5)}
    with pytest.raises(InvalidArgument, match="at most 4"):
        LLM(files.model, lora=five, **OPTIONS)
    with LLM(files.model, lora=five, lora_init_without_apply=True, **OPTIONS) as llm:
        with pytest.raises(InvalidArgument, match="at most 4"):
            llm.generate(LONG, 1, lora=dict.fromkeys(five, 1.0))
        quarter = {str(i): 0.25 for i in range(4)}
        assert answer(llm, quarter)[0] == answer(llm, {"4": 1.0})[0]  # the files are equal
    with LLM(files.model, **OPTIONS) as llm, pytest.raises(InvalidArgument, match="has no adapters"):
        llm.generate(LONG, 1, lora={"a": 1.0})


def test_a_saved_state_has_its_adapters(
    files: Files, llm: LLM, cold: list[list[int]], tmp_path: Path
) -> None:
    path, plain = tmp_path / "with", tmp_path / "without"
    answer(llm, {"a": 1.0}, slot=0)
    llm.save_state(path, slot=0)
    answer(llm, {}, slot=1)
    llm.save_state(plain, slot=1)
    renamed = {"x": files.lora["b"], "y": files.lora["a"]}  # other ids and names
    with LLM(files.model, lora=renamed, lora_init_without_apply=True, **OPTIONS) as other:
        other.load_state(path, slot=0)
        assert answer(other, {}, slot=0) == (cold[0], len(LONG))
        other.load_state(path, slot=0)
        assert answer(other, {"y": 1.0}, slot=0) == (cold[1], 1)
    with LLM(files.model, **OPTIONS) as other:
        with pytest.raises(StateError, match="open the model with this adapter"):
            other.load_state(path, slot=0)
        other.load_state(plain, slot=0)
        assert answer_without(other) == cold[0]


def answer_without(llm: LLM) -> list[int]:
    return llm.generate(LONG, 6, temperature=0, slot=0).tokens


# ---- activated adapters ----


def test_an_activated_adapter_begins_at_its_invocation(files: Files) -> None:
    """Positions before the invocation have no adapter, and their blocks are shared with the base."""
    prompt = [*LONG[:40], *INVOCATION, *LONG[40:60]]
    with LLM(files.model, lora={"x": files.activated, "a": files.lora["a"]}, lora_init_without_apply=True,
             **OPTIONS) as llm:  # fmt: skip
        base, always, with_x = (llm.logits(prompt, lora=c) for c in ({}, {"a": 1}, {"x": 1}))
        assert nmse(with_x[:40], base[:40]) < 1e-11
        assert nmse(with_x[40:], base[40:]) > 0.01 and nmse(with_x[40:], always[40:]) > 0.001
    with LLM(files.model, lora={"x": files.activated}, lora_init_without_apply=True, **OPTIONS) as llm:
        first = llm.generate(prompt, 5, temperature=0, lora={})
        second = llm.generate(prompt, 5, temperature=0, lora={"x": 1})
        assert first.timings["prompt_n"] == len(prompt) and second.timings["prompt_n"] == len(prompt) - 40
        assert second.tokens[0] == with_x[-1].argmax() and second.tokens != first.tokens
        third = llm.generate(prompt, 5, temperature=0, lora={"x": 1})
        assert third.tokens == second.tokens and third.timings["prompt_n"] == 1
        # without the invocation the adapter is not used
        unused, none = (llm.generate(LONG, 5, temperature=0, lora=c) for c in ({"x": 1}, {}))
        assert unused.tokens == none.tokens and none.timings["prompt_n"] == 1


def test_marks() -> None:
    a, b = AdapterUse(0, 1.0, "a"), AdapterUse(1, 0.5, "b", start=40)
    assert block_mark((a, b), 0, 32) == (("a", 1.0, 0),)
    assert block_mark((a, b), 32, 64) == (("a", 1.0, 0), ("b", 0.5, 8))
    assert block_mark((b,), 64, 96) == (("b", 0.5, 0),)
    assert adapters_at((a, b), 39) == ((0, 1.0),) and adapters_at((a, b), 40) == ((0, 1.0), (1, 0.5))
    assert next_start((a, b), 0) == 40 and next_start((a, b), 40) == EVERYWHERE
    assert n_alike((a, b), (a, b)) == n_alike((), ()) == EVERYWHERE
    assert n_alike((a, b), (a,)) == 40 and n_alike((a,), ()) == 0
    moved = AdapterUse(7, 1.0, "a")  # the same content with another id
    assert n_alike((a,), (moved,)) == EVERYWHERE
    assert last_occurrence([1, 2, 1, 2, 3], (1, 2)) == 2 and last_occurrence([1], (1, 2)) is None
