"""Drafts of multi-token prediction heads do not change the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS, covering, some, wide
from oracles.fixture import N_CTX, PROMPT, write
from oracles.heads import HEADS, with_good_head, with_head
from runners import load_runner
from scheduling import drafting, finish, tokens_of

from vkbackend.models.drafting.drafter import Want
from vkbackend.models.drafting.heads import HeadDrafter
from vkbackend.models.engine.drafters import drafters_of
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Generate
from vkbackend.models.placement import traced_steps
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.step import Run

PROMPTS = PROMPT[:9], PROMPT[5:16], PROMPT[20:23]
CHAINS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 4, "mirostat": 2},
    {"seed": 3},
    {"seed": 4, "repeat_penalty": 1.3, "dry_multiplier": 0.5, "dry_sequence_breakers": ()},
]
OPTIONS: dict[str, Any] = {"n_ctx": N_CTX, "n_ubatch": 32, "n_snapshots": 4, "exact": True}
TWO = ["numpy"] * 2


@dataclass(frozen=True)
class Outcome:
    texts: list[list[tuple[int, ...]]]  # by chain and request
    n_steps: int  # of the model
    n_reduces: int
    n_drafted: int = 0
    n_accepted: int = 0


def outcome(
    path: Path,
    devices: list[str],
    chains: list[dict[str, Any]],
    speculation: str | None,
    n: int = 24,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    **options: Any,
) -> Outcome:
    options = OPTIONS | {"speculation": speculation, "n_slots": 3} | options
    runner = load_runner(path, devices=devices, **options)
    engine = Engine(runner, speculation=drafting(runner, *drafters_of(runner)))
    launch, n_steps, texts = engine.runner.launch, 0, []

    def counted(*args: Any) -> Any:
        nonlocal n_steps
        n_steps += not args[1].ahead
        return launch(*args)

    engine.runner.launch = counted  # type: ignore[method-assign]
    try:
        prompts = prompts[: options["n_slots"]]
        for chain in chains:
            requests = [Generate(i, tuple(p), n, SamplingParams(**chain)) for i, p in enumerate(prompts)]
            answers = finish(engine, requests)
            texts.append([tuple(tokens_of(answers[request.id])) for request in requests])
        drafts = engine._speculation
        counts = (drafts.n_drafted, drafts.n_accepted) if drafts else ()
        return Outcome(texts, n_steps, engine.runner.reduce_stats()[0], *counts)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


def model(folder: Path, name: str, gain: float | None) -> Path:
    """Return a model whose head is often right. Without a gain, the head is random."""
    path = folder / f"{name}-{gain}.gguf"
    if not path.exists():
        write(with_head(name) if gain is None else with_good_head(name, gain), path)
    return path


def same(path: Path, devices: list[str], chains: list[dict[str, Any]], **options: Any) -> Outcome:
    plain, drafted = (outcome(path, devices, chains, kind, **options) for kind in (None, "mtp"))
    assert drafted.texts == plain.texts and drafted.n_drafted > 0
    return drafted


@pytest.mark.wide
@pytest.mark.parametrize("name", HEADS)
def test_tokens_are_those_of_plain_decoding(folder: Path, name: str) -> None:
    assert same(model(folder, name, 0.3), TWO, CHAINS[:2], n=10).n_accepted > 0


@pytest.mark.wide
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("gain", [None, 0.1, 0.3])
@pytest.mark.parametrize("devices", [pytest.param(d, id=str(len(d))) for d in (TWO[:1], TWO)])
def test_every_head_and_chain(folder: Path, name: str, gain: float | None, devices: list[str]) -> None:
    same(model(folder, name, gain), devices, CHAINS)


ON_VULKAN = [p for p in DEVICE_SETS if p.id in ("0", "0,0")]


@pytest.mark.parametrize(("name", "devices"), covering(["qwen35", "glm4moe"], ON_VULKAN))
def test_tokens_on_vulkan(folder: Path, name: str, devices: list[str]) -> None:
    same(model(folder, name, 0.2), devices, CHAINS[:1], n=12)


@pytest.mark.parametrize("name", some(HEADS, 11))
def test_a_right_head_gives_eight_tokens_a_step(folder: Path, name: str) -> None:
    """The first token comes with the prompt, and three steps of 8 rows produce 23 more. A draft exchanges two
    sums, or one sum if the model adds the results of attention and experts together."""
    path = model(folder, name, 0.0)
    plain, drafted = (outcome(path, TWO, CHAINS[:1], kind, n_slots=1) for kind in (None, "mtp"))
    assert drafted.texts == plain.texts and drafted.n_accepted == drafted.n_drafted == 20
    assert (plain.n_steps, drafted.n_steps) == (24, 4)
    of_drafts = 20 * (1 if name.startswith("cohere2moe") else 2)
    assert drafted.n_reduces == plain.n_reduces // 24 * 4 + of_drafts


def test_few_blocks_and_random_heads(folder: Path) -> None:
    """Three sequences need 6 blocks, but the cache has only 4. A
    drafting step writes only to the sequence's own blocks."""
    options = {"kv_cells": 128, "prefix_cache": False, "n": 22}
    same(model(folder, "glm4moe", None), ["numpy"], CHAINS[:1], **options)


def test_sequences_with_a_common_beginning(folder: Path) -> None:
    """The second chain's sequences begin with cached blocks, which hold the head's K and V."""
    prompts = [PROMPT[:34], PROMPT[:36], PROMPT[:34] + PROMPT[:3]]
    drafted = same(model(folder, "glm4moe", 0.3), ["numpy"], CHAINS[:2], prompts=prompts, n=8)
    assert drafted.n_accepted > 0


def test_a_least_probability_ends_drafts(folder: Path) -> None:
    path = model(folder, "glm4moe", 0.3)
    counts = [outcome(path, ["numpy"], CHAINS[:1], "mtp", 12, n_slots=1, draft_p_min=p) for p in (0, 0.1, 1)]
    assert counts[0].n_drafted > counts[1].n_drafted > counts[2].n_drafted == 0
    assert len({repr(of.texts) for of in counts}) == 1


@pytest.mark.parametrize("devices", [wide(pytest.param(TWO[:1])), TWO])
def test_devices_choose_the_drafted_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str]
) -> None:
    """With a large vocabulary, the devices return the best token and the sum for its probability."""
    path, drafts = model(folder, "glm4moe", None), []
    for on_devices in (False, True):
        if on_devices:
            monkeypatch.setattr(traced_steps, "TOP_K_VOCAB", 64)
            monkeypatch.setattr(traced_steps, "MAX_TOP_K", 8)
        runner = load_runner(path, devices=devices, **OPTIONS, speculation="mtp", n_slots=2)
        assert (runner.max_top_k > 0) == on_devices
        runner.step(PROMPT[:9], [Run(0, 0, 9, 0)], [])
        runner.step(PROMPT[:5], [Run(1, 0, 5, 0)], [])
        drafts.append(runner.draft(PROMPT[9:11], [0, 1], [9, 5], summed=True))
        runner.close()
    assert drafts[0][0].tolist() == drafts[1][0].tolist()
    assert drafts[0][1] is not None and drafts[1][1] is not None
    assert np.allclose(drafts[0][1], drafts[1][1], rtol=1e-5) and (drafts[0][1] < 1).all()


def test_the_time_of_a_drafted_token_is_learned() -> None:
    class Slow:
        is_idle, now, took = True, 0.0, 8.0

        def draft(self, tokens: list[int], *_: Any) -> tuple[np.ndarray, None]:
            self.now += self.took
            return np.array(tokens), None

    head = Slow()
    drafter = HeadDrafter(head, clock=lambda: head.now)
    wants = [Want(slot, slot, [1], [1], 1) for slot in (0, 1)]
    drafter.draft(wants)  # The step is recorded.
    assert drafter.seconds == 0
    for head.took in (2.0, 4.0, 3.0):
        drafter.draft(wants)
        assert drafter.seconds == 2.0, "the least recent time"
    drafter.draft(wants[:1])
    assert drafter.seconds == 2.0


def test_a_busy_runner_gets_no_drafts() -> None:
    class Busy:
        is_idle = False

    drafter = HeadDrafter(Busy())  # type: ignore[arg-type]
    assert [list(d.tokens) for d in drafter.draft([Want(0, 0, [1], [1], 3)])] == [[]]
