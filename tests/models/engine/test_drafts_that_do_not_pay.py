"""Drafts that save no time cost little time. The clock advances by invented step times."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_runner import N_VOCAB, FakeRunner, continuation
from scheduling import GREEDY, Everything, finish, prompt, tokens_of

from vkbackend.models.drafting.draft_model import DraftModel, Rows
from vkbackend.models.engine import step_times
from vkbackend.models.engine.drafters import limits_of
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Generate
from vkbackend.models.engine.speculation import Speculation

pytestmark = pytest.mark.no_vulkan

ROW = 0.02  # Each additional row makes a step longer by this. A step of one row takes a second.
N_PROMPT, N_TOKENS = 100, 200
PRICE = 1.0


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Timed(FakeRunner):
    def __init__(self, clock: Clock, **options: Any) -> None:
        super().__init__(**options)
        self.clock = clock

    def step(self, tokens: Sequence[int], *more: Any) -> np.ndarray:
        self.clock.now += PRICE + ROW * (len(tokens) - 1)
        return super().step(tokens, *more)


class Smaller:
    """A draft model. A step takes `step_s`, plus `row_s` for each additional row."""

    n_vocab, n_ubatch = N_VOCAB, 128

    def __init__(self, clock: Clock, n_ctx: int, right: bool, step_s: float, row_s: float) -> None:
        self.clock, self.n_ctx, self._right = clock, n_ctx, right
        self._step_s, self._row_s = step_s, row_s
        self.texts: dict[int, list[int]] = {}
        self.used_s = 0.0

    def rewind(self, slot: int, n: int) -> int:
        del self.texts.setdefault(slot, [])[n:]
        return n

    def best(self, rows: Sequence[Rows], summed: bool) -> tuple[np.ndarray, None]:
        seconds = self._step_s + self._row_s * (sum(len(row.tokens) for row in rows) - 1)
        self.clock.now += seconds
        self.used_s += seconds
        for row in rows:
            assert row.first == len(self.texts[row.slot])
            self.texts[row.slot] += row.tokens
        guess = [continuation(self.texts[row.slot], 1)[0] if self._right else 43 for row in rows]
        return np.array(guess), None

    def close(self) -> None: ...


def seconds_of(
    monkeypatch: pytest.MonkeyPatch, n_texts: int = 1, n_prompts: Sequence[int] = (), **of_draft: Any
) -> tuple[list[float], float]:
    """Return the time of each text's answer relative to decoding without drafts, and the draft model's
    seconds."""
    clock = Clock()
    monkeypatch.setattr(step_times, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    runner = Timed(clock, n_ctx=1024, n_ubatch=512, undoes=True)
    small = Smaller(clock, 1024, **of_draft)
    drafter = DraftModel(small, 1, N_VOCAB, clock=clock.perf_counter)
    drafter.measure()
    small.used_s = 0.0
    engine = Engine(runner, Everything(), Speculation([drafter], limits_of(runner)))  # type: ignore[arg-type]
    shares = []
    for i, n_prompt in enumerate(n_prompts or [N_PROMPT] * n_texts):
        tokens, began = prompt(n_prompt, i), clock.now
        events = finish(engine, [Generate(i, tokens, N_TOKENS, GREEDY)])[i]
        assert tokens_of(events) == continuation(tokens, N_TOKENS)
        shares.append((clock.now - began - PRICE - ROW * (n_prompt - 1)) / (PRICE * (N_TOKENS - 1)))
    return shares, small.used_s


def test_a_fast_and_right_draft_model_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    [share], _ = seconds_of(monkeypatch, right=True, step_s=0.05, row_s=0.01)
    assert share < 0.4


def test_a_long_prompt_is_completed_over_several_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 2 % of the answer's time, the draft model computes 600 rows in 5 steps."""
    [share], _ = seconds_of(monkeypatch, n_prompts=[600], right=True, step_s=0.05, row_s=0.004)
    assert share < 0.4


@pytest.mark.parametrize("right", [False, True])
def test_a_slow_draft_model_does_not_compute_the_prompt(monkeypatch: pytest.MonkeyPatch, right: bool) -> None:
    """If the draft model takes longer than the model, drafts save no time even if all of them are right."""
    [share], used_s = seconds_of(monkeypatch, right=right, step_s=1.2, row_s=0.3)
    assert share < 1.02 and used_s < 0.02 * N_TOKENS


@pytest.mark.parametrize("row_s", [0.002, pytest.param(0.02, marks=pytest.mark.wide), 0.2])
def test_wrong_drafts_cost_the_first_tries(monkeypatch: pytest.MonkeyPatch, row_s: float) -> None:
    """The first draft skips most of a prompt whose rows are expensive. The next texts begin with the times
    and acceptance learned from the first."""
    (first, *others), _ = seconds_of(monkeypatch, n_texts=3, right=False, step_s=0.1, row_s=row_s)
    assert first < 1.05 and max(others) < 1.04 and sum(others) / len(others) < 1.03


def test_drafts_after_skipped_tokens_do_not_judge_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts are too expensive to compute completely, and without their middle all drafts are wrong. The
    third prompt is short, so its drafts are right."""
    monkeypatch.setitem(globals(), "N_TOKENS", 100)
    shares, _ = seconds_of(monkeypatch, n_prompts=(400, 400, 20), right=True, step_s=0.2, row_s=0.02)
    assert min(shares[:2]) > 1 and shares[2] < 0.6


@pytest.mark.parametrize(("row_s", "drafts"), [(0.2, False), (0.002, True)])
def test_a_short_answer_is_drafted_if_the_prompt_is_cheap(
    monkeypatch: pytest.MonkeyPatch, row_s: float, drafts: bool
) -> None:
    """At 0.2 s a row, the prompt's 100 rows take longer than the drafts of 40 tokens can save."""
    monkeypatch.setitem(globals(), "N_TOKENS", 40)
    shares, used_s = seconds_of(monkeypatch, n_texts=2, right=True, step_s=0.1, row_s=row_s)
    assert (used_s > 0) is drafts and (max(shares) < 0.9 if drafts else max(shares) < 1.001)
