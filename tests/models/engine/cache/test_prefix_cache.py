"""The fake runner's caches store tokens, so a wrong cell changes the next logits."""

from __future__ import annotations

import random
from itertools import starmap

import pytest
from device_sets import some
from fake_runner import continuation
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import examples
from scheduling import GREEDY, KINDS, check_sound, events_of, finish, make, prompt, tokens_of

from vkbackend.models.engine.cache.blocks import Pool
from vkbackend.models.engine.cache.prefix_cache import PrefixCache
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Cancel, CopySlot, Event, Generate, Logits, Request
from vkbackend.ops import CELL_BLOCK

pytestmark = pytest.mark.no_vulkan


def blocks_in_use(engine: Engine) -> list[tuple[int, int]]:
    """Return, for each layer group, the number of unused blocks and of all blocks. Unused blocks are free or
    in the prefix tree."""
    cache = engine.cache
    return [(len(group.free) + len(group.unused), group.pool.n_blocks) for group in cache.groups]


# ---- what is computed ----


@pytest.mark.parametrize("kind", ["all positions", "window"])
def test_a_shared_beginning_is_computed_once(kind: str) -> None:
    engine, runner = make(n_slots=2, n_ctx=512, n_ubatch=64, **KINDS[kind])
    shared = prompt(360)
    first, second = shared + prompt(40, 1), shared + prompt(40, 2)
    finish(engine, [Generate(0, first, 3, GREEDY)])
    before = runner.n_rows
    events = finish(engine, [Generate(1, second, 3, GREEDY)])[1]
    assert tokens_of(events) == continuation(second, 3)
    timings = events[-1].timings
    assert timings is not None and timings.prompt_n == runner.n_rows - before - 2
    assert timings.prompt_n <= 40 + CELL_BLOCK
    check_sound(engine)


def test_a_prefix_is_shared_while_the_first_request_runs() -> None:
    engine, runner = make(n_slots=3, n_ctx=512, n_ubatch=64)
    shared = prompt(360)
    requests = [shared + prompt(40, i) for i in range(3)]
    for i, tokens in enumerate(requests):
        engine.submit(Generate(i, tokens, 8, GREEDY))
    events = finish(engine, [])
    for i, tokens in enumerate(requests):
        assert tokens_of(events[i]) == continuation(tokens, 8)
    assert runner.n_rows <= 360 + 3 * (40 + CELL_BLOCK) + 3 * 7
    assert runner.n_copies == 0


def test_equal_concurrent_prompts_are_computed_once() -> None:
    engine, runner = make(n_slots=4, n_ctx=256, n_ubatch=64)
    tokens = prompt(200)
    events = finish(engine, [Generate(i, tokens, 4, GREEDY) for i in range(4)])
    assert all(tokens_of(events[i]) == continuation(tokens, 4) for i in range(4))
    assert runner.n_rows <= 200 + 3 * CELL_BLOCK + 4 * 3
    assert engine.stats()["cells_shared"] == 6 * CELL_BLOCK


def test_a_chat_of_a_recurrent_model_resumes() -> None:
    engine, runner = make(n_slots=2, n_ctx=512, n_ubatch=64, snapshots=2)
    turn = prompt(100)
    for i in range(4):
        before = runner.n_rows
        answer = tokens_of(finish(engine, [Generate(i, turn, 20, GREEDY)])[i])
        assert answer == continuation(turn, 20)
        assert i == 0 or runner.n_rows - before <= 30 + 1 + 19
        turn = (*turn, *answer, *prompt(30, i))
    # While the first slot is busy, another slot reuses the full blocks that both prompts share.
    engine.submit(Generate(9, (*turn, 1), 30, GREEDY))
    engine.step()
    before = runner.n_rows
    events = finish(engine, [Generate(10, (*turn[: len(turn) - 30], 3, 4), 2, GREEDY)])[10]
    assert tokens_of(events) == continuation((*turn[: len(turn) - 30], 3, 4), 2)


def test_without_sharing_every_prompt_is_computed() -> None:
    engine, runner = make(n_slots=1, n_ctx=256, n_ubatch=64, prefix_cache=False)
    tokens = prompt(100)
    for i in range(2):
        finish(engine, [Generate(i, tokens, 2, GREEDY)])
    assert runner.n_rows == 2 * 101
    check_sound(engine)


def test_a_slot_copies_a_shared_block_before_writing() -> None:
    engine, runner = make(n_slots=2, n_ctx=256, n_ubatch=64)
    tokens = prompt(100)
    finish(engine, [Generate(0, tokens, 1, GREEDY, slot=0)])
    other = (*tokens[:50], *prompt(20, 5))
    before = runner.n_rows
    events = finish(engine, [Generate(1, other, 1, GREEDY, slot=0), Generate(2, tokens, 1, GREEDY, slot=1)])
    assert runner.n_copies == 1 and runner.n_rows - before == 20 + 100 - 3 * CELL_BLOCK
    assert tokens_of(events[1]) == continuation(other, 1) and tokens_of(events[2]) == continuation(tokens, 1)
    check_sound(engine)


def test_blocks_are_written_to_the_table_once() -> None:
    written: list[tuple[int, int, int, int]] = []
    cache = PrefixCache([Pool(8)], 2, lambda *entry: written.append(entry))
    cache.begin(0, [])
    for end in (1, 20, 32, 33, 40):
        assert cache.reserve(0, end)
    assert [entry[:3] for entry in written] == [(0, 0, 0), (0, 0, 1)]


# ---- few blocks ----


def test_the_youngest_is_preempted_and_resumes() -> None:
    engine, _ = make(n_slots=4, n_ctx=128, n_ubatch=64, blocks=6)
    tokens = [prompt(40, i) for i in range(4)]
    events = finish(engine, [Generate(i, t, 80, GREEDY) for i, t in enumerate(tokens)])
    assert all(tokens_of(events[i]) == continuation(t, 80) for i, t in enumerate(tokens))
    assert engine.stats()["n_preempted"] > 0
    assert [i for i in sorted(events, key=lambda i: [e.done for e in events[i]].index(True))][:1] == [0]
    check_sound(engine)


def test_the_least_recently_used_block_is_evicted_first() -> None:
    engine, runner = make(n_slots=1, n_ctx=128, n_ubatch=64, blocks=8)
    a, b, c = (prompt(100, i) for i in range(3))
    # each request leaves 3 full blocks, and uses 4 blocks while it runs
    for i, tokens in enumerate((a, b, a, c)):
        finish(engine, [Generate(i, tokens, 1, GREEDY)])
    before = runner.n_rows
    finish(engine, [Generate(4, a, 1, GREEDY)])
    assert runner.n_rows - before == 100 - 3 * CELL_BLOCK, "b was used before a"
    check_sound(engine)


@pytest.mark.parametrize("n_in_flight", [1, 2, 3])
def test_tokens_are_in_order_when_a_copy_ends_several_steps(n_in_flight: int) -> None:
    """Copying a slot waits for all steps in flight, so one News message may contain several tokens of a
    request."""
    asked = [prompt(n, n) for n in (75, 38, 60)]
    for n_steps in range(0, 40, 3):
        engine, _ = make(n_slots=4, n_ctx=96, n_ubatch=8, n_in_flight=n_in_flight)
        for i, tokens in enumerate(asked):
            engine.submit(Generate(i, tokens, 9, GREEDY))
        events: dict[int, list[Event]] = {}
        for _ in range(n_steps):
            for event in events_of(engine.step()):
                events.setdefault(event.id, []).append(event)
        for id_, more in finish(engine, [CopySlot(9, 0, 3)]).items():
            events.setdefault(id_, []).extend(more)
        for i, tokens in enumerate(asked):
            assert tokens_of(events[i]) == continuation(tokens, 9), (n_steps, i)


@settings(max_examples=examples(10), deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", list(KINDS))
def test_trees_of_prompts(kind: str, data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    n_slots, n_ctx = rng.randint(1, 5), 192
    engine, _ = make(
        n_slots=n_slots, n_ctx=n_ctx, n_ubatch=rng.choice([8, 33, 64]),
        blocks=rng.choice([None, 6, 9, 14]), n_in_flight=rng.choice([1, 1, 2, 3]), **KINDS[kind],
    )  # fmt: skip
    prompts: list[tuple[int, ...]] = [prompt(rng.randint(1, 150), rng.randrange(99))]
    events: dict[int, list[Event]] = {}
    asked: dict[int, tuple[tuple[int, ...], int]] = {}
    cancelled: set[int] = set()
    for i in range(rng.randint(4, 16)):
        base = rng.choice(prompts)
        tokens = base[: rng.randint(1, len(base))] + prompt(rng.randint(0, 40), rng.randrange(99))
        tokens = tokens[: n_ctx - 1] or (1,)
        n = rng.randint(1, 40)
        slot = rng.choice([None, None, rng.randrange(n_slots)])
        engine.submit(Generate(i, tokens, n, GREEDY, slot=slot, priority=rng.randint(-1, 1)))
        asked[i] = tokens, n
        if rng.random() < 0.1:
            engine.submit(Logits(100 + i, tokens[:60]))
        for _ in range(rng.randint(0, 12)):
            for event in events_of(engine.step()):
                events.setdefault(event.id, []).append(event)
                if event.id < 100 and event.done:
                    prompts.append((*tokens, *tokens_of(events[event.id]))[:150])
        if rng.random() < 0.15:
            gone = rng.randrange(i + 1)
            engine.submit(Cancel(gone))
            cancelled.add(gone)
        if rng.random() < 0.15 and n_slots > 1 and len(engine.scheduler.free) > 0:
            target = rng.choice(sorted(engine.scheduler.free))
            engine.submit(CopySlot(200 + i, rng.randrange(n_slots), target))
        check_sound(engine)
    for id_, more in finish(engine, []).items():
        events.setdefault(id_, []).extend(more)
    check_sound(engine)
    for id_, (tokens, n) in asked.items():
        want = continuation(tokens, min(n, n_ctx - len(tokens) + 1))
        got = tokens_of(events.get(id_, []))
        assert got == want or (id_ in cancelled and got == want[: len(got)]), (id_, tokens)
    rows: list[Request] = [Logits(999, prompt(70, 3))]
    assert sum(len(e.logits) for e in finish(engine, rows)[999] if e.logits is not None) == 70
    assert len(engine.scheduler.free) == n_slots and not engine.scheduler.running


# ---- many requests ----


@pytest.mark.parametrize("n", [200, pytest.param(10_000, marks=pytest.mark.wide)])
@pytest.mark.parametrize(
    ("kind", "n_in_flight"), some(starmap(pytest.param, [("both", 2), *((kind, 1) for kind in KINDS)]), 3)
)
def test_many_requests_leave_no_objects(kind: str, n_in_flight: int, n: int) -> None:
    rng = random.Random(n)
    engine, _ = make(n_slots=4, n_ctx=128, n_ubatch=48, blocks=10, n_in_flight=n_in_flight, **KINDS[kind])
    bases = [prompt(80, i) for i in range(5)]
    asked: dict[int, tuple[int, ...]] = {}
    got: dict[int, list[int]] = {}
    done: dict[int, str] = {}
    for i in range(n):
        base = rng.choice(bases)
        asked[i] = (*base[: rng.randint(0, 80)], *prompt(rng.randint(1, 12), rng.randrange(50)))
        late = rng.choice([None, None, None, 0.0, 10.0])
        engine.submit(
            Generate(i, asked[i], rng.randint(1, 8), GREEDY, priority=rng.randint(-2, 2), deadline_s=late)
        )
        for _ in range(rng.randint(0, 9)):
            for event in events_of(engine.step()):
                _note(event, got, done)
        if rng.random() < 0.1:
            engine.submit(Cancel(rng.randint(max(0, i - 8), i)))
        if i % 500 == 0:
            check_sound(engine)
    for events in finish(engine, [], limit=50 * n).values():
        for event in events:
            _note(event, got, done)
    check_sound(engine)
    for i, tokens in got.items():
        assert tokens == continuation(asked[i], len(tokens)), i
    assert {"length", "DeadlineExceeded"} <= set(done.values()) and len(done) > 0.8 * n
    scheduler = engine.scheduler
    assert not engine._by_id and not scheduler.running and not len(scheduler.waiting)
    assert len(scheduler.waiting._any) <= 64 and len(engine._deadlines._heap) <= 128
    assert len(scheduler.free) == 4
    for slot in range(4):
        engine.cache.drop(slot)
    assert all(free == total for free, total in blocks_in_use(engine)), "every block is free or in the tree"


def _note(event: Event, got: dict[int, list[int]], done: dict[int, str]) -> None:
    if event.token is not None:
        got.setdefault(event.id, []).append(event.token)
    if event.done:
        done[event.id] = event.error.kind if event.error else str(event.finish_reason)
