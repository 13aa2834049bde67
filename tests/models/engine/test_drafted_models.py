"""With real models, drafts change neither the tokens nor the bits of any logits."""

from __future__ import annotations

import random
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS, product
from drafts import Guesses
from oracles.fixture import N_VOCAB, PROMPT, write
from oracles.fixtures import FIXTURES, build
from places import DATA
from runners import load_runner
from scheduling import Everything, drafting, events_of, tokens_of

from vkbackend.models.drafting.drafter import Want
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Generate
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.placement import recurrent_state
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.step import Run

ALONE, PAIR = (p for p in DEVICE_SETS if p.id in ("0", "0,0"))
# By default, few kinds of caches and states run, with the ops that other tests have compiled.
FEW = ("llama-0", "lfm2-0,0")
FEWER = ("lfm2-0,0",)
MEMORIES = (
    "llama", "stories-w256-F16+q8_0", "phi3+window", "llama4+chunks", "gpt-oss", "gemma3n", "gemma4+shared",
    "deepseek2", "deepseek32", "glm-dsa+shared",
)  # fmt: skip
RECURRENT = (
    "qwen3next", "qwen35", "kimi-linear", "lfm2", "mamba2", "granitehybrid", "falcon-h1", "nemotron_h",
)  # fmt: skip
CHAINS = {
    "greedy": SamplingParams(temperature=0),
    "seed": SamplingParams(seed=3),
    "penalties and DRY": SamplingParams(
        seed=4, repeat_penalty=1.3, dry_multiplier=0.5, dry_sequence_breakers=()
    ),
    "Mirostat": SamplingParams(seed=4, mirostat=2),
}
PROMPTS = PROMPT[:9], PROMPT[5:16], PROMPT[20:23]
N_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafted")


def open_runner(folder: Path, name: str, devices: list[str], **options: Any) -> Runner:
    if name.endswith("+q8_0"):
        name = name.removesuffix("+q8_0")
        options |= {"type_k": "q8_0", "type_v": "q8_0"}
    path = folder / f"{name}.gguf"
    if name.startswith("stories"):
        path = DATA / f"{name}.gguf"
    elif not path.exists():
        write(build(name), path)
    sizes = {"n_ctx": 64, "n_slots": 3, "n_ubatch": 32, "n_snapshots": 1}
    return load_runner(path, devices=devices, exact=True, speculation="ngram", **{**sizes, **options})


def cases(names: tuple[str, ...], few: tuple[str, ...]) -> list[Any]:
    return [
        pytest.param(
            *case.values, id=case.id, marks=[*case.marks, *([] if case.id in few else [pytest.mark.wide])]
        )
        for case in product(names, [ALONE, PAIR])
    ]


def generate(runner: Runner, params: SamplingParams, drafter: Guesses | None = None) -> list[list[int]]:
    """A new engine has an empty prefix cache, so all runs compute the prompts in the same steps."""
    engine = Engine(runner, Everything(), drafting(runner, drafter))
    tokens: dict[int, list[int]] = {i: [] for i in range(len(PROMPTS))}
    for i, prompt in enumerate(PROMPTS):
        engine.submit(Generate(i, tuple(prompt), N_TOKENS, params))
    while engine.busy:
        for event in events_of(engine.step()):
            assert event.error is None
            tokens[event.id] += tokens_of([event])
    return list(tokens.values())


@pytest.mark.parametrize(("name", "devices"), cases(FIXTURES, FEWER))
def test_tokens_equal_those_of_plain_decoding(
    folder: Path, name: str, devices: list[str], request: pytest.FixtureRequest
) -> None:
    """By default, half of the drafts of each chain are right."""
    shares = (0.9, 0.5, 0.0) if request.config.getoption("--all") else (0.5,)
    runner = open_runner(folder, name, devices)
    try:
        for chain, params in CHAINS.items():
            plain = generate(runner, params)
            texts = {tuple(p): t for p, t in zip(PROMPTS, plain, strict=True)}

            def truth(want: Want, texts: dict[tuple[int, ...], list[int]] = texts) -> list[int]:
                history = list(want.history)
                [(prompt, text)] = [(p, t) for p, t in texts.items() if [*p, *t][: len(history)] == history]
                return text[len(history) - len(prompt) :]

            for share in shares:
                drafter = Guesses(truth, share, 1, N_VOCAB)
                assert generate(runner, params, drafter) == plain, (chain, share)
                assert drafter.n_drafted > N_TOKENS and (drafter.n_accepted > N_TOKENS or share < 0.9)
    finally:
        runner.close()


@pytest.mark.parametrize(("name", "devices"), cases(MEMORIES, FEW))
def test_random_rejections_leave_the_logits_of_a_fresh_computation(
    folder: Path, name: str, devices: list[str], request: pytest.FixtureRequest
) -> None:
    """Each case verifies a random draft, of which a random number of tokens is right. All valid rows must
    equal rows that another slot has computed one by one, without drafts."""
    check_rejections(open_runner(folder, name, devices), name, request)


@pytest.mark.parametrize("rows", [True, pytest.param(False, marks=pytest.mark.wide)])
@pytest.mark.parametrize(("name", "devices"), cases(RECURRENT, FEW))
def test_random_rejections_with_recurrent_states(
    folder: Path, name: str, devices: list[str], rows: bool, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each slot has an undo cell, or each row of a draft has a cell."""
    monkeypatch.setattr(recurrent_state, "ROW_STATES_SHARE", inf if rows else 0)
    runner = open_runner(folder, name, devices)
    assert all(bool(plan.n_row_cells) is rows for plan in runner.layout.states)
    check_rejections(runner, name, request, rows)


def check_rejections(
    runner: Runner, name: str, request: pytest.FixtureRequest, stores_rows: bool = False
) -> None:
    """With --all, the 52 models and devices verify 10,400 drafts."""
    n_left, rng = 200 if request.config.getoption("--all") else 30, random.Random(name)
    tokens = [rng.randrange(N_VOCAB) for _ in range(64)]
    try:
        want = np.stack([runner.step([t], [Run(0, 0, 1, at)], [0])[0].copy() for at, t in enumerate(tokens)])
        slot, n_right = 1, 0  # `tokens[:n_right]` are accepted
        while n_left:
            if n_right > 64 - 9:
                n_right = 0
            start = runner.resume_at(slot, n_right) if n_right else 0
            if n_right == 0:  # a prompt of up to 8 rows, which have the same bits as single rows
                n_right = rng.randint(1, 8)
                runner.step(tokens[:n_right], [Run(slot, 0, n_right, 0)], [n_right - 1])
                continue
            n_left -= 1
            assert n_right - start <= 8, "the state before the last draft is kept"
            assert not stores_rows or start == n_right, "every row's state is kept"
            n_known = n_right + 1 - start
            n_draft = rng.randint(0, 8 - n_known)
            accepted = rng.randint(0, n_draft)
            draft = tokens[n_right + 1 : n_right + 1 + accepted]
            draft += [rng.randrange(N_VOCAB) for _ in range(n_draft - accepted)]
            n = n_known + n_draft
            run = Run(slot, 0, n, start, undoes=n > 1)
            rows = runner.step([*tokens[start : n_right + 1], *draft], [run], range(n))
            n_valid = n_known + accepted
            assert np.array_equal(rows[:n_valid], want[start : start + n_valid])
            n_right += 1 + accepted
    finally:
        runner.close()
