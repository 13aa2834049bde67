"""Drafts of multi-token prediction heads leave the text as it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from device_sets import covering, some
from oracles.fixture import N_CTX, PROMPT, write
from oracles.heads import HEADS, with_good_head, with_head
from runners import load_runner
from scheduling import finish, tokens_of

from vkbackend.models.drafting.heads import HeadDrafter
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Generate
from vkbackend.models.sampling.params import SamplingParams

N = 24
PROMPTS = PROMPT[:9], PROMPT[5:16], PROMPT[20:23]
CHAINS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 3},
    {"seed": 4, "repeat_penalty": 1.3, "dry_multiplier": 0.5, "dry_sequence_breakers": ()},
    {"seed": 4, "mirostat": 2},
]
OPTIONS: dict[str, Any] = {"n_ctx": N_CTX, "n_ubatch": 32, "n_snapshots": 4, "exact": True}


@dataclass(frozen=True)
class Outcome:
    texts: list[list[tuple[int, ...]]]  # by chain and request
    n_steps: int
    n_reduces: int
    n_drafted: int
    n_accepted: int


def outcome(
    path: Path, devices: list[str], heads: bool, chains: list[dict[str, Any]], **options: Any
) -> Outcome:
    options = OPTIONS | {"speculation": "mtp" if heads else None, "n_slots": 3} | options
    runner = load_runner(path, devices=devices, **options)
    engine = Engine(runner, drafter=HeadDrafter(runner) if heads else None)
    texts, n_steps = [], 0
    try:
        launch = runner.launch

        def counted(*args: Any) -> Any:
            nonlocal n_steps
            n_steps += not args[1].ahead
            return launch(*args)

        runner.launch = counted  # type: ignore[method-assign]
        for chain in chains:
            requests = [Generate(i, tuple(p), N, SamplingParams(**chain)) for i, p in enumerate(PROMPTS)]
            answers = finish(engine, requests[: options["n_slots"]])
            texts.append([tuple(tokens_of(answers[r.id])) for r in requests[: options["n_slots"]]])
        s = engine._speculation
        counts = (s.n_drafted, s.n_accepted) if s else (0, 0)
        return Outcome(texts, n_steps, runner.reduce_stats()[0], *counts)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


def model(folder: Path, name: str, gain: float | None) -> Path:
    path = folder / f"{name}-{gain}.gguf"
    if not path.exists():
        write(with_head(name) if gain is None else with_good_head(name, gain), path)
    return path


DEVICES = [["numpy"], ["numpy"] * 2]


@pytest.mark.parametrize(
    ("name", "devices"), covering(HEADS, [pytest.param(d, id=str(len(d))) for d in DEVICES])
)
@pytest.mark.parametrize("gain", [0.3, *some([pytest.param(None, id="random")], 2)[1:]])
def test_tokens_are_those_of_plain_decoding(
    folder: Path, name: str, devices: list[str], gain: float | None
) -> None:
    path = model(folder, name, gain)
    plain, drafting = (outcome(path, devices, heads, CHAINS) for heads in (False, True))
    assert drafting.texts == plain.texts
    assert drafting.n_drafted > 0
    print(name, gain, drafting.n_drafted, drafting.n_accepted, plain.n_steps, drafting.n_steps)


@pytest.mark.parametrize("name", some(HEADS, 3))
def test_a_right_head_gives_eight_tokens_a_step(folder: Path, name: str) -> None:
    path = model(folder, name, 0.0)
    plain, drafting = (outcome(path, ["numpy"] * 2, heads, CHAINS[:1], n_slots=1) for heads in (False, True))
    assert drafting.texts == plain.texts and drafting.n_accepted == drafting.n_drafted
    print(name, plain, drafting)
