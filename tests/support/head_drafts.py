"""Generates with and without the drafts of a head that is a layer of the model. `head` contains the options
that load the head: {"speculation": "mtp"}, or {"draft": FILE} for an EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.fixture import N_CTX, PROMPT
from runners import load_runner
from scheduling import drafting, finish, tokens_of

from vkbackend.models.engine.drafters import drafters_of
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Generate
from vkbackend.models.engine.runner.draft_runner import HeadRunner
from vkbackend.models.placement import traced_steps
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.step import Run

PROMPTS = PROMPT[:9], PROMPT[5:16], PROMPT[20:23]
FOUR_PROMPTS = *PROMPTS, PROMPT[12:18]
CHAINS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 4, "mirostat": 2},
    {"seed": 3},
    {"seed": 4, "repeat_penalty": 1.3, "dry_multiplier": 0.5, "dry_sequence_breakers": ()},
]
OPTIONS: dict[str, Any] = {"n_ctx": N_CTX, "n_ubatch": 32, "n_snapshots": 4, "exact": True}
TWO = ["numpy"] * 2
NO_HEAD: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Outcome:
    texts: list[list[tuple[int, ...]]]  # by chain and request
    n_steps: int  # of the model
    n_reduces: int
    n_drafted: int = 0
    n_accepted: int = 0


def engine_of(path: Path, devices: list[str], head: Mapping[str, Any], **options: Any) -> Engine:
    runner = load_runner(path, devices=devices, **OPTIONS | {"n_slots": 3} | dict(head) | options)
    return Engine(runner, speculation=drafting(runner, *drafters_of(runner)))


def outcome(
    path: Path,
    devices: list[str],
    chains: list[dict[str, Any]],
    head: Mapping[str, Any],
    n: int = 24,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    together: bool = False,
    **options: Any,
) -> Outcome:
    """Run the chains one after another, each with all prompts. If `together`, each chain has one prompt."""
    engine = engine_of(path, devices, head, **options)
    launch, n_steps, texts = engine.runner.launch, 0, []

    def counted(*args: Any) -> Any:
        nonlocal n_steps
        n_steps += not args[1].ahead
        return launch(*args)

    engine.runner.launch = counted  # type: ignore[method-assign]
    try:
        for at in range(1 if together else len(chains)):
            of = chains if together else [chains[at]] * len(prompts)
            pairs = enumerate(zip(prompts, of, strict=True))
            requests = [Generate(i, tuple(p), n, SamplingParams(**chain)) for i, (p, chain) in pairs]
            answers = finish(engine, requests)
            texts.append([tuple(tokens_of(answers[request.id])) for request in requests])
        drafts = engine._speculation
        counts = (drafts.n_drafted, drafts.n_accepted) if drafts else ()
        return Outcome(texts, n_steps, engine.runner.reduce_stats()[0], *counts)
    finally:
        engine.close()


def same(
    path: Path, devices: list[str], chains: list[dict[str, Any]], head: Mapping[str, Any], **options: Any
) -> Outcome:
    plain, drafted = (outcome(path, devices, chains, way, **options) for way in (NO_HEAD, head))
    assert drafted.texts == plain.texts and drafted.n_drafted > 0
    return drafted


def same_for_every_chain(path: Path, devices: list[str], head: Mapping[str, Any]) -> Outcome:
    return same(path, devices, CHAINS, head, prompts=FOUR_PROMPTS, together=True, n_slots=4, n=20)


def check_eight_tokens_a_step(path: Path, head: Mapping[str, Any]) -> tuple[Outcome, Outcome]:
    """The prompt's last step produces the first token, and three steps of 8 rows produce 23 more. Return the
    outcomes without and with drafts."""
    how: dict[str, Any] = {"n_slots": 1, "prompts": PROMPTS[:1]}
    plain, drafted = (outcome(path, TWO, CHAINS[:1], way, **how) for way in (NO_HEAD, head))
    assert drafted.texts == plain.texts and drafted.n_accepted == drafted.n_drafted == 20
    assert (plain.n_steps, drafted.n_steps) == (24, 4)
    return plain, drafted


def check_few_blocks(path: Path, head: Mapping[str, Any]) -> None:
    """Three sequences need 6 blocks, but the cache has only 4. A drafting step writes only to the sequence's
    own blocks."""
    same(path, TWO[:1], CHAINS[:1], head, kv_cells=128, prefix_cache=False, n=22)


def check_common_beginning(path: Path, head: Mapping[str, Any]) -> None:
    """The sequences of the second chain begin with cached blocks, which contain the head's K and V."""
    prompts = [PROMPT[:34], PROMPT[:36], PROMPT[:34] + PROMPT[:3]]
    assert same(path, TWO[:1], CHAINS[:2], head, prompts=prompts, n=8).n_accepted > 0


def check_least_probability(path: Path, head: Mapping[str, Any]) -> None:
    how: dict[str, Any] = {"n_slots": 1, "prompts": PROMPTS[:1]}
    counts = [outcome(path, TWO[:1], CHAINS[:1], head, 12, draft_p_min=least, **how) for least in (0, 0.1, 1)]
    assert counts[0].n_drafted > counts[1].n_drafted > counts[2].n_drafted == 0
    assert len({repr(of.texts) for of in counts}) == 1


def check_choice_on_devices(
    path: Path, devices: list[str], head: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a large vocabulary, the devices return the best token, and the sum from which its probability is
    computed."""
    drafts = []
    for on_devices in (False, True):
        if on_devices:
            monkeypatch.setattr(traced_steps, "TOP_K_VOCAB", 64)
            monkeypatch.setattr(traced_steps, "MAX_TOP_K", 8)
        runner = load_runner(path, devices=devices, **OPTIONS, **head, n_slots=2)
        assert (runner.max_top_k > 0) == on_devices
        runner.step(PROMPT[:9], [Run(0, 0, 9, 0)], [])
        runner.step(PROMPT[:5], [Run(1, 0, 5, 0)], [])
        drafts.append(HeadRunner(runner).draft(PROMPT[9:11], [0, 1], [9, 5], summed=True))
        runner.close()
    assert drafts[0][0].tolist() == drafts[1][0].tolist()
    assert drafts[0][1] is not None and drafts[1][1] is not None
    assert np.allclose(drafts[0][1], drafts[1][1], rtol=1e-5) and (drafts[0][1] < 1).all()
