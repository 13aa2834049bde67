"""After rejected drafts, real models compute the same bits as without drafts, for every kind of cache and
state."""

from __future__ import annotations

import random
from math import inf
from pathlib import Path

import numpy as np
import pytest
from drafted_models import on_one_and_two, open_runner
from oracles.fixture import N_VOCAB

from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.placement import recurrent_state
from vkbackend.step import Run

# By default, a few kinds of caches and states run, with ops that other tests have compiled.
MEMORIES = (
    "llama", "stories-w256-F16+q8_0", "phi3+window", "llama4+chunks", "gpt-oss", "gemma3n", "gemma4+shared",
    "deepseek2", "deepseek32", "glm-dsa+shared",
)  # fmt: skip
RECURRENT = (
    "qwen3next", "qwen35", "kimi-linear", "lfm2", "mamba2", "granitehybrid", "falcon-h1", "nemotron_h",
    "mamba", "jamba", "rwkv7",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rejected")


@pytest.mark.parametrize(("name", "devices"), on_one_and_two(MEMORIES, "llama-0"))
def test_random_rejections_leave_the_logits_of_a_fresh_computation(
    folder: Path, name: str, devices: list[str], request: pytest.FixtureRequest
) -> None:
    """Each case verifies a random draft, of which a random number of tokens is right. All valid rows must
    equal rows that another slot has computed one by one, without drafts."""
    check_rejections(open_runner(folder, name, devices), name, request)


@pytest.mark.parametrize("rows", [True, pytest.param(False, marks=pytest.mark.wide)])
@pytest.mark.parametrize(("name", "devices"), on_one_and_two(RECURRENT, "lfm2-0,0"))
def test_random_rejections_with_recurrent_states(
    folder: Path, name: str, devices: list[str], rows: bool, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Recurrent states have an undo cell per slot, or a cell for each row of a draft."""
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
