"""Drafts of EAGLE-3 heads do not change the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS, some
from oracles.eagle import eagle3, good_eagle3
from oracles.fixture import N_CTX, PROMPT, write
from oracles.fixtures import build
from runners import load_runner
from scheduling import drafting, finish, tokens_of

from vkbackend.errors import InvalidArgument
from vkbackend.models.engine.drafters import drafters_of
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Cancel, Generate
from vkbackend.models.options import Options
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
TARGETS = ("llama", "qwen3moe", "gpt-oss", "gemma4", "qwen35", "lfm2", "nemotron_h")


@dataclass(frozen=True)
class Pair:
    model: Path
    head: Path


@dataclass(frozen=True)
class Outcome:
    texts: list[list[tuple[int, ...]]]  # by chain and request
    n_steps: int  # of the model
    n_drafted: int = 0
    n_accepted: int = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eagle3")


def pair(folder: Path, name: str, gain: float | None, n_draft: int = 128) -> Pair:
    """Return a model and a head that is often right. Without a gain, the head is random."""
    files = Pair(*(folder / f"{name}-{gain}-{n_draft}-{of}.gguf" for of in ("model", "head")))
    if not files.head.exists():
        target = build(name)
        made = (target, eagle3(target, states=[0, 1, target.n_layer])) if gain is None else None
        for fixture, path in zip(
            made or good_eagle3(name, gain or 0.0, n_draft), (files.model, files.head), strict=True
        ):
            write(fixture, path)
    return files


def engine_of(files: Pair, devices: list[str], drafts: bool, **options: Any) -> Engine:
    options = OPTIONS | {"n_slots": 3} | options
    runner = load_runner(files.model, devices=devices, draft=files.head if drafts else None, **options)
    return Engine(runner, speculation=drafting(runner, *drafters_of(runner)))


def outcome(
    files: Pair,
    devices: list[str],
    chains: list[dict[str, Any]],
    drafts: bool,
    n: int = 24,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    **options: Any,
) -> Outcome:
    engine = engine_of(files, devices, drafts, **options)
    launch, n_steps, texts = engine.runner.launch, 0, []

    def counted(*args: Any) -> Any:
        nonlocal n_steps
        n_steps += not args[1].ahead
        return launch(*args)

    engine.runner.launch = counted  # type: ignore[method-assign]
    try:
        for chain in chains:
            requests = [Generate(i, tuple(p), n, SamplingParams(**chain)) for i, p in enumerate(prompts)]
            answers = finish(engine, requests)
            texts.append([tuple(tokens_of(answers[request.id])) for request in requests])
        made = engine._speculation
        return Outcome(texts, n_steps, *((made.n_drafted, made.n_accepted) if made else ()))
    finally:
        engine.close()


def same(files: Pair, devices: list[str], chains: list[dict[str, Any]], **options: Any) -> Outcome:
    plain, drafted = (outcome(files, devices, chains, drafts, **options) for drafts in (False, True))
    assert drafted.texts == plain.texts and drafted.n_drafted > 0
    return drafted


@pytest.mark.wide
def test_tokens_are_those_of_plain_decoding(folder: Path) -> None:
    assert same(pair(folder, "llama", 0.3), TWO, CHAINS[:2], n=10).n_accepted > 0


@pytest.mark.wide
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("gain", [None, 0.1, 0.3])
@pytest.mark.parametrize("devices", [pytest.param(d, id=str(len(d))) for d in (TWO[:1], TWO)])
def test_every_chain(folder: Path, name: str, gain: float | None, devices: list[str]) -> None:
    drafted = same(pair(folder, name, gain), devices, CHAINS)
    assert gain is None or drafted.n_accepted > 0


ON_VULKAN = [p for p in DEVICE_SETS if p.id in ("0", "0,0")]


@pytest.mark.wide
@pytest.mark.parametrize("devices", ON_VULKAN)
def test_tokens_on_vulkan(folder: Path, devices: list[str]) -> None:
    same(pair(folder, "llama", 0.2), devices, CHAINS[:1], n=12)


@pytest.mark.parametrize("name", some(TARGETS, 7))
def test_a_right_head_gives_eight_tokens_a_step(folder: Path, name: str) -> None:
    """The first token comes with the prompt, and three steps of 8 rows produce 23 more. d2t is a permutation
    of all tokens."""
    files, how = pair(folder, name, 0.0), {"n_slots": 1, "prompts": PROMPTS[:1]}
    plain, drafted = (outcome(files, TWO, CHAINS[:1], drafts, **how) for drafts in (False, True))
    assert drafted.texts == plain.texts and drafted.n_accepted == drafted.n_drafted == 20
    assert (plain.n_steps, drafted.n_steps) == (24, 4)


@pytest.mark.wide
def test_a_small_draft_vocabulary(folder: Path) -> None:
    """Tokens outside of it are never drafted, and the others are still right."""
    files = pair(folder, "llama", 0.0, n_draft=100)
    drafted = same(files, TWO, CHAINS[2:3])
    assert 0 < drafted.n_accepted < drafted.n_drafted


@pytest.mark.wide
def test_few_blocks_and_random_heads(folder: Path) -> None:
    """Three sequences need 6 blocks, but the cache has only 4. A drafting step writes only to the sequence's
    own blocks."""
    same(pair(folder, "llama", None), TWO[:1], CHAINS[:1], kv_cells=128, prefix_cache=False, n=22)


@pytest.mark.wide
def test_sequences_with_a_common_beginning(folder: Path) -> None:
    """The second chain's sequences begin with cached blocks, which hold the head's K and V."""
    prompts = [PROMPT[:34], PROMPT[:36], PROMPT[:34] + PROMPT[:3]]
    assert same(pair(folder, "llama", 0.3), TWO[:1], CHAINS[:2], prompts=prompts, n=8).n_accepted > 0


@pytest.mark.wide
def test_a_least_probability_ends_drafts(folder: Path) -> None:
    files = pair(folder, "llama", 0.3)
    counts = [outcome(files, TWO[:1], CHAINS[:1], True, 12, draft_p_min=p) for p in (0, 0.1, 1)]
    assert counts[0].n_drafted > counts[1].n_drafted > counts[2].n_drafted == 0
    assert len({repr(of.texts) for of in counts}) == 1


@pytest.mark.wide
def test_cancels_and_requests_of_one_prompt(folder: Path) -> None:
    """Requests with one prompt (n > 1) share blocks; some end in the middle of a draft, and their slots serve
    others."""
    files, texts = pair(folder, "llama", 0.2), []
    for drafts in (False, True):
        engine = engine_of(files, TWO[:1], drafts)
        given = [
            Generate(i, tuple(PROMPT[:33]), 14, SamplingParams(seed=i, temperature=0.5)) for i in range(6)
        ]
        for request in given:
            engine.submit(request)
        for _ in range(4):
            engine.step()
        done = finish(
            engine, [Cancel(1), Cancel(4), Generate(9, tuple(PROMPT[:20]), 14, SamplingParams(seed=9))]
        )
        texts.append({i: tokens_of(done[i]) for i in (0, 2, 3, 5, 9) if i in done})
        engine.close()
    assert {i: text[-5:] for i, text in texts[0].items()} == {i: text[-5:] for i, text in texts[1].items()}


@pytest.mark.wide
@pytest.mark.parametrize("devices", [TWO[:1], TWO])
def test_devices_choose_the_drafted_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str]
) -> None:
    """With a large vocabulary, the devices return the best row of the draft vocabulary and the sum for its
    probability."""
    files, drafts = pair(folder, "llama", None), []
    for on_devices in (False, True):
        if on_devices:
            monkeypatch.setattr(traced_steps, "TOP_K_VOCAB", 64)
            monkeypatch.setattr(traced_steps, "MAX_TOP_K", 8)
        runner = load_runner(files.model, devices=devices, **OPTIONS, draft=files.head, n_slots=2)
        assert (runner.max_top_k > 0) == on_devices
        runner.step(PROMPT[:9], [Run(0, 0, 9, 0)], [])
        runner.step(PROMPT[:5], [Run(1, 0, 5, 0)], [])
        drafts.append(runner.draft(PROMPT[9:11], [0, 1], [9, 5], summed=True))
        runner.close()
    assert drafts[0][0].tolist() == drafts[1][0].tolist()
    assert drafts[0][1] is not None and drafts[1][1] is not None
    assert np.allclose(drafts[0][1], drafts[1][1], rtol=1e-5) and (drafts[0][1] < 1).all()


@pytest.mark.no_vulkan
def test_options(folder: Path) -> None:
    """A file's architecture decides how it drafts."""
    files = pair(folder, "llama", None)
    assert Options.of(files.model, draft=files.head).speculation == ("eagle3",)
    assert Options.of(files.model, draft=files.model).speculation == ("draft",)
    both = Options.of(files.model, draft=files.head, speculation="ngram,draft-eagle3")
    assert both.speculation == ("ngram", "eagle3") and both.of_draft is None and both.head == str(files.head)
    with pytest.raises(InvalidArgument, match="an EAGLE-3 head needs its file"):
        Options.of(files.model, speculation="draft-eagle3")
    with pytest.raises(InvalidArgument, match="give one of draft and eagle3"):
        Options.of(files.model, draft=files.head, speculation="draft,eagle3")
    with pytest.raises(InvalidArgument, match="an EAGLE-3 head is a layer of the model"):
        Options.of(files.model, draft=files.head, draft_devices="0")
    with pytest.raises(InvalidArgument, match="give one of mtp and eagle3"):
        Options.of(files.model, draft=files.head, speculation="mtp,eagle3")
