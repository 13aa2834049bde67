"""The fake runner's cells and recurrent states store tokens, and its logits depend on all of them. If a token
of a rejected draft remains in a cell or state, the text changes or an assertion fails."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_sets import covering
from drafts import Guesses, always_right
from fake_runner import FakeRunner, continuation
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import examples
from scheduling import (
    GREEDY,
    Everything,
    Free,
    check_sound,
    drafting,
    events_of,
    finish,
    make,
    prompt,
    tokens_of,
)  # fmt: skip

from vkbackend.models.drafting.drafter import Draft, Want
from vkbackend.models.engine import step_times
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Cancel, CopySlot, Event, Generate, Logits, Pause, Resume
from vkbackend.models.engine.speculation import Limits, Speculation
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.ops import CELL_BLOCK

pytestmark = pytest.mark.no_vulkan

N_PLAIN = 40  # With larger token ids, the fake runner returns wrong results or errors.
# Snapshots per slot, and whether rows of drafts store recurrent states. None: without recurrent states.
STATES = [(None, False), (0, False), (2, False), (0, True), (2, True)]

ON_FEW_BLOCKS = covering(
    [pytest.param(*state, id="-".join(map(str, state))) for state in STATES], [0.0, 0.7, 1.0]
)


def truth(want: Want) -> list[int]:
    return continuation(want.tokens, want.n)


def right(n: int = 7) -> Guesses:
    return always_right(truth, n)


def check_nodes(engine: Engine, runner: FakeRunner) -> None:
    stack = [(node, tokens) for tokens, node in engine.cache.tree.root.children.items()]
    while stack:
        node, tokens = stack.pop()
        stack += [(child, more) for more, child in node.children.items()]
        for group, block in enumerate(node.blocks):
            if block >= 0:
                assert tuple(runner.cells[group][block].tolist()) == tuple(tokens)
    check_sound(engine)
    if states := runner.states:
        kept = [cell for node in engine.cache.snapshots._nodes if (cell := node.state) is not None]
        kept += [cell for slot in states._snapshots for cell in slot.values()]
        own = [*states._cells, *states._undo_cells, *states._free, *states._row_cells]
        assert sorted(own + kept) == list(range(states.n_cells)), "every cell has one owner"


def same_as_plain(options: dict[str, Any], requests: list[Any], drafter: Guesses) -> None:
    plain, _ = make(**options)
    expected = finish(plain, requests)
    engine, runner = make(**options, drafter=drafter)
    got = finish(engine, requests)
    for request in requests:
        before, after = expected[request.id], got[request.id]
        assert tokens_of(after) == tokens_of(before)
        assert after[-1].finish_reason == before[-1].finish_reason
        if isinstance(request, Logits):
            rows = [[e.logits for e in events if e.logits is not None] for events in (before, after)]
            assert np.array_equal(np.concatenate(rows[0]), np.concatenate(rows[1]))
    check_nodes(engine, runner)


@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_any_drafts_give_the_tokens_of_plain_decoding(data: st.DataObject) -> None:
    draw = data.draw
    shifts = draw(st.booleans())
    n_ctx = draw(st.sampled_from([24, 64, 100]))
    options: dict[str, Any] = {
        "n_slots": draw(st.integers(1, 4)), "n_ctx": n_ctx, "n_ubatch": draw(st.sampled_from([1, 3, 8, 32])),
        "n_in_flight": draw(st.integers(1, 2)), "prefix_cache": draw(st.booleans()),
    }  # fmt: skip
    if shifts:
        options["context_shift"] = True
    else:
        options["snapshots"] = draw(st.sampled_from([None, 0, 1, 2]))
        options["stores_rows"] = draw(st.booleans())
        options["window"] = draw(st.sampled_from([0, 20]))
    requests: list[Any] = []
    n_common = draw(st.integers(0, n_ctx))
    for i in range(draw(st.integers(1, 6))):
        tokens = (prompt(n_common) + prompt(n_ctx, i + 1))[: draw(st.integers(1, n_ctx))]
        if draw(st.integers(0, 4)) == 0:
            requests.append(Logits(i, tokens))
            continue
        limit = draw(st.sampled_from([0, 1, 2, 30, 90] if shifts else [None, 0, 1, 2, 30]))
        params = SamplingParams(temperature=draw(st.sampled_from([0, 1.0])), seed=i)
        stops = frozenset(range(draw(st.integers(0, 4))))
        requests.append(Generate(i, tokens, limit, params, stops, n_keep=draw(st.integers(0, 9))))
    guesses = Guesses(truth, draw(st.sampled_from([0, 0.5, 0.9, 1])), draw(st.integers(0, 99)), N_PLAIN)
    same_as_plain(options, requests, guesses)


@pytest.mark.parametrize(("snapshots", "rows", "share"), ON_FEW_BLOCKS)
def test_few_blocks_preempt_sequences_with_drafts(share: float, snapshots: int | None, rows: bool) -> None:
    """Four sequences need 16 blocks and share 5. Preempted sequences lose their drafts and run again."""
    options = {"n_slots": 4, "n_ctx": 120, "blocks": 5, "n_ubatch": 32}
    options |= {"snapshots": snapshots, "stores_rows": rows}
    requests = [Generate(i, prompt(30, i), 70, GREEDY) for i in range(4)]
    drafter = Guesses(truth, share, 3, N_PLAIN)
    same_as_plain(options, requests, drafter)
    assert drafter.n_drafted > 50


def test_a_draft_never_preempts() -> None:
    """Only the last block has free cells. The free cells are enough for the next token, but not for the
    draft."""
    for drafter in (None, right()):
        engine, _ = make(n_slots=2, n_ctx=64, blocks=2, drafter=drafter)
        done = finish(engine, [Generate(i, prompt(20, i), CELL_BLOCK - 20, GREEDY) for i in range(2)])
        assert engine.scheduler.n_preempted == 0 and len(done) == 2


# ---- rows ----


@pytest.mark.parametrize("share", [0.0, 0.7])
def test_rows_with_states_are_computed_once(share: float) -> None:
    """With an undo cell, the rows of accepted tokens are computed again after a rejected token."""
    drafter, n_rows = Guesses(truth, share, 3, N_PLAIN), []
    for rows in (True, False):
        drafter = Guesses(truth, share, 3, N_PLAIN)
        engine, runner = make(n_ctx=128, snapshots=1, stores_rows=rows, drafter=drafter)
        finish(engine, [Generate(0, prompt(5), 100, GREEDY)])
        n_rows.append(runner.n_rows)
        rejected = drafter.n_drafted - drafter.n_accepted
        assert (runner.n_rows == 5 + 99 + rejected) is rows and rejected > 20
    assert n_rows[0] < n_rows[1]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("n", "with_rows", "with_undo"), [(3, (1.57, 2.55), (2.29, 2.46)), (7, (2.49, 3.20), (2.94, 2.72))]
)
def test_the_figures_of_docs(n: int, with_rows: tuple[float, ...], with_undo: tuple[float, ...]) -> None:
    """Check the rows per token and the tokens per step in docs/speculation.md, for drafts of n tokens, each
    of which is right with probability 0.7."""
    for rows, figures in ((True, with_rows), (False, with_undo)):
        drafter = Guesses(truth, 0.7, 3, N_PLAIN, n)
        drafter._next = lambda want: continuation(want.tokens, min(want.n, n))  # type: ignore[method-assign]
        engine, runner = make(n_ctx=1100, n_ubatch=32, snapshots=1, stores_rows=rows, drafter=drafter)
        finish(engine, [Generate(0, prompt(5), 800, GREEDY)])
        steps = [sum(run.n_rows for run in runs) for runs in runner.steps[1:]]
        assert (round(sum(steps) / 799, 2), round(799 / len(steps), 2)) == figures


@pytest.mark.parametrize(("n", "n_slots", "rows"), [(7, 1, 8), (3, 1, 4), (7, 2, 8), (7, 3, 8), (1, 3, 6)])
def test_right_drafts_fill_a_step(n: int, n_slots: int, rows: int) -> None:
    engine, runner = make(n_slots=n_slots, n_ctx=128, drafter=right(n))
    finish(engine, [Generate(i, prompt(5, i), 60, GREEDY) for i in range(n_slots)])
    steps = [sum(run.n_rows for run in runs) for runs in runner.steps[1:]]
    assert max(steps) == rows and sum(steps) <= 59 * n_slots
    assert len(steps) <= 2 + -(-59 * n_slots // rows)


def test_eight_sequences_leave_no_rows_for_drafts() -> None:
    drafter = right()
    engine, runner = make(n_slots=9, drafter=drafter)
    finish(engine, [Generate(i, prompt(3, i), 9, GREEDY) for i in range(9)])
    assert not drafter.n_drafted and all(run.n_rows == 1 for runs in runner.steps[3:] for run in runs)


def test_wrong_drafts_cost_no_steps() -> None:
    plain, runner = make(n_ctx=128)
    finish(plain, [Generate(0, prompt(5), 100, GREEDY)])
    drafter = Guesses(lambda want: [43] * want.n, 1.0, 0, N_PLAIN)  # never the best token
    engine, drafted = make(n_ctx=128, drafter=drafter)
    finish(engine, [Generate(0, prompt(5), 100, GREEDY)])
    assert len(drafted.steps) == len(runner.steps) and drafter.n_drafted > 100 and not drafter.n_accepted


@pytest.mark.parametrize("limit", [1, 2, 3, 8, 9, 17])
def test_drafts_end_with_the_text(limit: int) -> None:
    engine, runner = make(n_ctx=64, drafter=right())
    events = finish(engine, [Generate(0, prompt(4), limit, GREEDY)])[0]
    assert tokens_of(events) == continuation(prompt(4), limit) and runner.n_rows == 4 + limit - 1
    assert [e.done for e in events] == [False] * (limit - 1) + [True]


def test_a_stop_token_in_a_draft_ends_the_text() -> None:
    tokens = continuation(prompt(4), 12)
    stop = next(t for i, t in enumerate(tokens) if i > 4 and t not in tokens[:i])
    engine, _ = make(n_ctx=64, drafter=right())
    events = finish(engine, [Generate(0, prompt(4), 40, GREEDY, frozenset([stop]))])[0]
    assert tokens_of(events) == tokens[: tokens.index(stop) + 1] and events[-1].finish_reason == "stop"
    [content] = engine.scheduler.contents
    assert content.n_stored == 4 + tokens.index(stop), "the stop token and the drafts after it are not stored"


def test_context_end() -> None:
    for n_prompt, n_out in ((5, 12), (15, 2), (16, 1)):
        engine, runner = make(n_ctx=16, drafter=right())
        events = finish(engine, [Generate(0, prompt(n_prompt), None, GREEDY)])[0]
        assert tokens_of(events) == continuation(prompt(n_prompt), n_out)
        assert events[-1].finish_reason == "length" and runner.n_rows == 16


# ---- the drafters ----


def test_drafters_in_turn() -> None:
    """The second drafter is called only for sequences that the first drafter has no draft for. Each drafter
    learns from its own drafts."""
    first = always_right(lambda want: truth(want) * (len(want.tokens) % 2), 3)
    second = right(2)
    runner = FakeRunner(n_slots=2, n_ctx=128, undoes=True)
    engine = Engine(runner, Everything(), drafting(runner, first, second))  # type: ignore[arg-type]
    done = finish(engine, [Generate(i, prompt(5, i), 40, GREEDY) for i in range(2)])
    for i in range(2):
        assert tokens_of(done[i]) == continuation(prompt(5, i), 40)
    assert 0 < second.n_asked <= first.n_asked
    assert first.n_accepted == first.n_drafted > 0 < second.n_drafted == second.n_accepted
    engine.close()
    assert first.closed == second.closed == 1


def test_an_expensive_drafter_is_asked_only_if_it_pays() -> None:
    """Drafting a token takes as long as a step, and all steps have the same price here."""
    drafter = Guesses(lambda want: [43] * want.n, 1.0, 0, N_PLAIN)
    drafter.seconds = 1.0
    engine, _ = make(n_ctx=700, drafter=drafter)
    finish(engine, [Generate(0, prompt(5), 600, GREEDY)])
    assert drafter.n_asked == 3, "a try takes 2 % of the time since the last one"


@pytest.mark.parametrize(("limit", "asked"), [(0, False), (2, True), (None, True)])
def test_a_request_limits_its_drafts(limit: int | None, asked: bool) -> None:
    drafter = right()
    engine, runner = make(n_ctx=128, drafter=drafter)
    events = finish(engine, [Generate(0, prompt(5), 60, GREEDY, draft_max=limit)])[0]
    assert bool(drafter.n_asked) is asked
    most = max(run.n_rows for runs in runner.steps[1:] for run in runs)
    assert most == 1 + min(7, 7 if limit is None else limit)
    timings = events[-1].timings
    assert timings is not None and timings.draft_n == timings.draft_n_accepted == drafter.n_accepted
    assert engine.stats()["n_drafted"] == drafter.n_drafted
    assert engine.stats()["tokens_per_step"] == pytest.approx(60 / (60 - drafter.n_accepted))


def test_short_drafts_are_ignored() -> None:
    runner = FakeRunner(n_ctx=128)
    limits = Limits(128, 16, n_min=3)
    drafter = Guesses(truth, 1.0, 1, N_PLAIN)
    engine = Engine(runner, Everything(), Speculation([drafter], limits, Free()))  # type: ignore[arg-type]
    finish(engine, [Generate(0, prompt(5), 90, GREEDY)])
    rows = [run.n_rows for runs in runner.steps[1:] for run in runs]
    assert set(rows) <= {1, 4, 5, 6, 7, 8} and len(set(rows)) > 3
    assert next(n for n in rows if n > 1) == 4, "the first draft is as short as may be"


# ---- the middle of a draft ----


def test_answers_of_several_requests_are_in_order() -> None:
    engine, _ = make(n_slots=2, n_ctx=128, drafter=right(3))
    got: dict[int, list[Event]] = {0: [], 1: []}
    for i in range(2):
        engine.submit(Generate(i, prompt(5, i), 40, GREEDY, timed=i == 1))
    most = 0
    while engine.busy:
        news = events_of(engine.step())
        most = max(most, sum(e.id == 1 for e in news))
        for event in news:
            got[event.id].append(event)
    for i, events in got.items():
        assert tokens_of(events) == continuation(prompt(5, i), 40)
    counts = [e.timings.decode_n for e in got[1] if e.timings]
    assert counts == list(range(40)) and most == 4


@pytest.mark.parametrize(("snapshots", "rows"), STATES)
def test_a_cancel_keeps_the_accepted_tokens(snapshots: int | None, rows: bool) -> None:
    """A request is cancelled while its drafts are in flight and between steps. The next request continues
    from the slot's content."""
    for n_steps in range(3, 9):
        engine, runner = make(
            n_ctx=128, n_in_flight=2, snapshots=snapshots, stores_rows=rows,
            drafter=Guesses(truth, 0.8, n_steps, N_PLAIN),
        )  # fmt: skip
        engine.submit(Generate(0, prompt(5), 60, GREEDY))
        tokens = [*prompt(5)]
        for _ in range(n_steps):
            tokens += tokens_of(events_of(engine.step()))
        engine.scheduler.compose()
        engine.submit(Cancel(0))
        events = finish(engine, [Generate(1, tuple(tokens), 20, GREEDY)])[1]
        assert tokens_of(events) == continuation(tokens, 20)
        check_nodes(engine, runner)


@pytest.mark.parametrize(("snapshots", "rows"), STATES)
def test_a_slot_is_copied_between_verify_steps(snapshots: int | None, rows: bool) -> None:
    sizes: dict[str, Any] = {"n_slots": 2, "n_ctx": 128, "snapshots": snapshots, "stores_rows": rows}
    engine, _ = make(**sizes, drafter=Guesses(truth, 0.6, 1, N_PLAIN))
    engine.submit(Generate(0, prompt(5), 60, GREEDY))
    for _ in range(8):
        engine.step()
    engine.submit(CopySlot(1, 0, 1))
    [copied] = [event for event in events_of(engine.step()) if event.id == 1]
    assert copied.tokens and copied.error is None
    more = (*copied.tokens, 7, 8)
    done = finish(engine, [Generate(2, more, 9, GREEDY, slot=1)])
    assert tokens_of(done[2]) == continuation(more, 9)


def test_a_paused_request_gets_no_drafts() -> None:
    drafter = right(3)
    engine, _ = make(n_ctx=128, drafter=drafter)
    engine.submit(Generate(0, prompt(5), 60, GREEDY))
    for _ in range(3):
        engine.step()
    engine.submit(Pause(0))
    before = drafter.n_asked
    assert not engine.step() and drafter.n_asked == before
    engine.submit(Resume(0))
    finish(engine, [])
    assert drafter.n_asked > before


def test_a_deadline_ends_a_request_between_verify_steps() -> None:
    engine, _ = make(n_ctx=4000, drafter=right(3))
    events = finish(engine, [Generate(0, prompt(5), None, GREEDY, deadline_s=0.1)])[0]
    assert events[-1].error is not None and events[-1].error.kind == "DeadlineExceeded"
    assert len(engine.scheduler.free) == 1


def test_the_engine_closes_its_drafter() -> None:
    drafter = right()
    engine, _ = make(drafter=drafter)
    engine.close()
    assert drafter.closed == 1


def test_the_time_of_drafts_is_time_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, now = right(3), 0.0
    draft = drafter.draft

    def slow(wants: Sequence[Want]) -> list[Draft]:
        nonlocal now
        now += 1.0
        return draft(wants)

    drafter.draft = slow  # type: ignore[method-assign]
    monkeypatch.setattr(step_times, "time", SimpleNamespace(perf_counter=lambda: now))
    engine, _ = make(n_slots=1, n_ctx=64, drafter=drafter)
    timings = finish(engine, [Generate(0, prompt(5), 20, GREEDY)])[0][-1].timings
    assert timings and timings.decode_s == drafter.n_asked > 3
