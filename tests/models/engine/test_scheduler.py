from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from counted_calls import counted_calls
from fake_runner import SLOW, continuation
from scheduling import GREEDY, events_of, finish, make, tokens_of

from vkbackend.models.engine.budget import REFRESH, PrefillBudget
from vkbackend.models.engine.messages import Cancel, Generate, Logits, Pause, Resume, Stats

pytestmark = pytest.mark.no_vulkan


# ---- the queue ----


def test_one_request_too_many_is_refused() -> None:
    engine, _ = make(n_queue=2)
    for i in range(5):
        engine.submit(Generate(i, (i,), 2, GREEDY))
        if i == 0:
            engine.step()
    refused = {e.id: e.error.kind for e in events_of(engine.step()) if e.error}
    assert refused == {3: "QueueFull", 4: "QueueFull"}
    assert set(finish(engine, [])) == {1, 2}


def test_a_lower_priority_number_and_a_greater_age_run_first() -> None:
    engine, _ = make()
    order: list[int] = []
    for i, priority in enumerate((0, 0, 1, -1)):
        engine.submit(Generate(i, (i,), 2, GREEDY, priority=priority))
    while engine.busy:
        order += [e.id for e in events_of(engine.step()) if e.done]
    assert order == [3, 0, 1, 2]
    first = Generate(0, (1,), 1, GREEDY, priority=1)
    engine.submit(first)
    old = engine._by_id[0]
    assert old.order[0] == old.born + 10.0, "it is as one that came ten seconds later"


def test_a_deadline_ends_waiting_and_running_requests() -> None:
    engine, _ = make()
    engine.submit(Generate(0, (SLOW,), None, GREEDY, deadline_s=0.1))
    engine.submit(Generate(1, (1,), 2, GREEDY, deadline_s=0.05))
    engine.submit(Generate(2, (1, 2), 2, GREEDY, deadline_s=1e6))
    engine.submit(Logits(3, (SLOW, 1), deadline_s=0.0))
    engine.scheduler.admit()
    time.sleep(0.11)
    events = finish(engine, [])
    assert {i: events[i][-1].error.kind for i in (0, 1, 3) if events[i][-1].error} == dict.fromkeys(
        (0, 1, 3), "DeadlineExceeded"
    )
    assert tokens_of(events[2]) == continuation((1, 2), 2)
    assert len(engine.scheduler.free) == 1 and not engine.scheduler.running


def test_the_cost_of_a_step_does_not_depend_on_the_queue() -> None:
    def calls(n: int) -> int:
        engine, _ = make(n_slots=1, n_ctx=128)
        engine.submit(Generate(0, (1, 2), 60, GREEDY))
        for i in range(1, n):
            engine.submit(Generate(i, (1, 2), 60, GREEDY, slot=0 if i % 2 else None))
        for _ in range(5):
            engine.step()
        with counted_calls() as counts:
            for _ in range(10):
                engine.step()
        return sum(counts.values())

    assert calls(2000) <= calls(10) + 5


def test_cancelled_requests_are_removed_from_the_queue() -> None:
    engine, _ = make()
    for i in range(3000):
        engine.submit(Generate(i, (1,) * 20, 5, GREEDY))
    for i in range(1, 3000):
        engine.submit(Cancel(i))
    assert len(engine.scheduler.waiting) == 1 and len(engine.scheduler.waiting._any) < 100
    assert set(finish(engine, [])) == {0}


def test_a_cancelled_request_ends_within_two_steps() -> None:
    engine, runner = make(n_slots=2, n_ctx=256)
    for i in range(2):
        engine.submit(Generate(i, (i, 1), 200, GREEDY))
    for _ in range(5):
        engine.step()
    engine.submit(Cancel(0))
    assert {e.id for _ in range(2) for e in events_of(engine.step())} == {1}
    assert {run.slot for step in runner.steps[-2:] for run in step} == {1}


# ---- rows ----


def test_a_paused_request_computes_nothing_until_resumed() -> None:
    engine, runner = make(n_slots=2)
    for i in range(2):
        engine.submit(Generate(i, (i, 1), 20, GREEDY))
    engine.step()
    engine.submit(Pause(0))
    before = [tokens_of(events_of(engine.step())) for _ in range(5)]
    assert all(len(tokens) == 1 for tokens in before)
    engine.submit(Pause(1))
    assert not engine.step() and engine.is_stuck
    n = len(runner.steps)
    engine.submit(Resume(0))
    engine.submit(Resume(1))
    finish(engine, [])
    assert len(runner.steps) - n == 19 and not engine.is_stuck


def test_prompts_may_double_the_time_of_a_step() -> None:
    budget = PrefillBudget()
    assert budget.rows(0, 512, [4000]) == 512
    assert budget.rows(4, 508, [4000]) == 0, "first a step is measured without rows of prompts"
    budget.took(4, 0, 0.010)

    def steps(n_steps: int, row_s: float) -> list[int]:
        rows = []
        for _ in range(n_steps):
            if n := budget.rows(4, 508, [4000]):
                rows.append(n)
                budget.took(4, n, 0.010 + n * row_s)
            else:
                budget.took(4, 0, 0.010)
        return rows

    fast = steps(60, 0.0001)[-20:]
    assert 60 <= max(fast) <= 128, "100 rows take as long as the step without"
    assert min(steps(40, 0.004)[-20:]) >= 1 and max(steps(40, 0.004)) <= 3, "on a slower device 2.5 do"
    assert max(steps(40, 0.1)[-20:]) == 1, "one row is always there"
    assert max(steps(60, 0.0001)[-20:]) >= 60, "and it grows again"
    budgets = [budget.rows(4, 508, [4000]) for _ in range(2 * REFRESH)]
    assert 0 in budgets, "the step without is measured again"


def test_many_prompts_get_the_share_of_many_sequences() -> None:
    budget = PrefillBudget()
    budget.took(0, 100, 0.020)  # 100 rows of a prompt double the time of the decode-only step
    budget.took(2, 0, 0.010)
    assert budget.rows(2, 508, [4000]) == budget.rows(2, 508, 2 * [4000]) == 94, "100 rows, without padding"
    assert budget.rows(2, 508, 8 * [4000]) == 382, "four prompts per decoding sequence"
    assert budget.rows(2, 5000, 100 * [4000]) == 766, "at most MAX_SHARE"
    assert budget.rows(40, 508, 20 * [4000]) == 88, "a step of 40 takes at least as long as a step of 2"
    assert budget.rows(2, 5000, 20 * [100]) == 2000, "PAUSE_S suffices for all"
    assert budget.rows(2, 508, 20 * [100]) == 508 and budget.rows(2, 5000, 21 * [100]) < 800
    for _ in range(3):
        budget.took(2, 382, 0.030)
    assert budget.rows(2, 5000, 8 * [4000]) > 382, "the rows took less than four times as long"
    grown = budget.rows(2, 5000, 8 * [4000])
    budget.took(2, 382, 10.0)
    assert budget.rows(2, 5000, 8 * [4000]) > grown // 2, "a step that is slow once changes little"
    for _ in range(12):
        budget.took(2, 382, 0.100)
    assert budget.rows(2, 5000, 8 * [4000]) < 200


class Fixed(PrefillBudget):
    def rows(self, n_decode: int, most: int, waiting: Sequence[int]) -> int:
        return min(most, 3) if n_decode else most


def test_decoding_continues_during_a_prompt_of_a_few_rows_per_step() -> None:
    engine, runner = make(Fixed(), n_slots=3, n_ubatch=32, n_ctx=128)
    for i in range(2):
        engine.submit(Generate(i, (i, 1), 100, GREEDY))
    engine.step()
    engine.submit(Generate(2, tuple(range(30)), 5, GREEDY))
    for _ in range(9):
        assert sorted(e.id for e in events_of(engine.step())) == [0, 1]
        assert [run.n_rows for run in runner.steps[-1]] == [1, 1, 3], "runs of one row come first"


def test_prompts_alternate() -> None:
    engine, runner = make(n_slots=3, n_ubatch=8, n_ctx=128)
    for i in range(3):
        engine.submit(Generate(i, tuple((i + j) % 40 for j in range(24)), 2, GREEDY))
    for _ in range(6):
        engine.step()
    assert [step[0].slot for step in runner.steps[:6]] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("options", [{}, {"prefix_cache": False}, {"window": 20}, {"snapshots": 2}])
def test_stats(options: dict[str, Any]) -> None:
    engine, _ = make(n_slots=2, n_ctx=128, n_ubatch=64, **options)
    tokens = tuple(range(40)) + tuple(range(40))
    finish(engine, [Generate(0, tokens, 2, GREEDY)])
    for i in range(1, 4):
        engine.submit(Generate(i, tokens, 9, GREEDY))
    engine.step()
    engine.submit(Stats(9))
    [stats] = [e.stats for e in events_of(engine.step()) if e.id == 9]
    assert stats is not None
    assert (stats["n_running"], stats["n_waiting"], stats["n_slots_free"]) == (2, 1, 0)
    assert stats["cells"] == 256 and 0 < stats["cells_used"] <= 256
    assert (stats["hit_rate"] > 0) == options.get("prefix_cache", True)
    assert stats["step_ms_p99"] >= stats["step_ms_p50"] > 0


def test_a_single_prompt_row_does_not_count_as_decoding() -> None:
    measured: list[tuple[int, int]] = []

    class One(PrefillBudget):
        def rows(self, n_decode: int, most: int, waiting: Sequence[int]) -> int:
            return min(most, 1) if n_decode else most

        def took(self, n_decode: int, n_prompt: int, seconds: float) -> None:
            measured.append((n_decode, n_prompt))

    engine, _ = make(One(), n_slots=2, n_ctx=128)
    engine.submit(Generate(0, (1, 2), 50, GREEDY))
    engine.step()
    engine.submit(Generate(1, tuple(range(9)), 5, GREEDY))
    for _ in range(8):
        engine.step()
    assert measured == [(0, 2), *[(1, 1)] * 8]
