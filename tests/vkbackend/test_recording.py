"""The derived barriers order every conflict, without superfluous barriers. The checker detects every missing
barrier."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import examples
from recordings import buffer, dispatch, recordings, view, without_each_barrier

from vkbackend.buffer import Buffer, Home, View, Virtual
from vkbackend.hazards import check
from vkbackend.limits import Limits
from vkbackend.ops import Recorder
from vkbackend.recording import (
    FIRST_HEAD,
    SLOW,
    SUBMISSION_S,
    Barrier,
    Command,
    Copy,
    Cut,
    Dispatch,
    Exchange,
    Pace,
    Recording,
    Scope,
    cut_long,
    derive_barriers,
    push_constants,
)
from vkbackend.schedule import by_depth

pytestmark = pytest.mark.no_vulkan


def scopes(recording: Recording) -> list[Scope]:
    return [c.scope for c in recording.commands if isinstance(c, Barrier)]


def recording_of(*commands: Dispatch | Copy | Exchange) -> Recording:
    return derive_barriers(Recording("by hand", list(commands)))


@settings(max_examples=examples(100), deadline=None)
@given(recordings())
def test_derived_barriers_order_everything(recording: Recording) -> None:
    placed = derive_barriers(recording)
    assert not check(placed)
    assert [c for c in placed.commands if not isinstance(c, Barrier)] == recording.commands


@settings(max_examples=examples(100), deadline=None)
@given(recordings())
def test_every_missing_barrier_is_detected(recording: Recording) -> None:
    for barrier, crippled in without_each_barrier(derive_barriers(recording)):
        assert check(crippled), f"nobody misses the barrier {barrier.scope}"


@settings(max_examples=examples(100), deadline=None)
@given(recordings())
def test_recordings_without_barriers_are_detected(recording: Recording) -> None:
    assert check(recording)


@settings(max_examples=examples(100), deadline=None)
@given(recordings())
def test_order_by_depth_keeps_dependencies(recording: Recording) -> None:
    sorted_ = by_depth(recording)
    for before, after in zip(recording.segments(), sorted_.segments(), strict=True):
        place = {id(command): i for i, command in enumerate(after)}
        assert sorted(place) == sorted(map(id, before))
        for i, a in enumerate(before):
            for b in before[i + 1 :]:
                assert isinstance(a, Dispatch | Copy) and isinstance(b, Dispatch | Copy)
                pairs = [(x, y) for x in a.writes for y in (*b.reads, *b.writes)]
                pairs += [(x, y) for x in a.reads for y in b.writes]
                if any(x.overlaps(y) for x, y in pairs):
                    assert place[id(a)] < place[id(b)]
    assert not check(derive_barriers(sorted_))
    assert len(scopes(derive_barriers(sorted_))) <= len(scopes(derive_barriers(recording)))


@pytest.mark.parametrize(
    ("kinds", "flags"),
    [("dd", (False, False)), ("cd", (True, False)), ("dc", (False, True)), ("cc", (True, True))],
)
def test_barrier_stages_include_transfer_only_for_copies(kinds: str, flags: tuple[bool, bool]) -> None:
    a, b, c = buffer(), buffer(), buffer()
    record = {
        "d": lambda src, dst: dispatch([view(src)], [view(dst)]),
        "c": lambda src, dst: Copy(view(src), view(dst)),
    }
    placed = recording_of(record[kinds[0]](a, b), record[kinds[1]](b, c))
    [barrier] = [c for c in placed.commands if isinstance(c, Barrier) and c.scope is Scope.DEVICE]
    assert (barrier.after_copies, barrier.before_copies) == flags and not check(placed)
    for name, is_set in zip(("after_copies", "before_copies"), flags, strict=True):
        if is_set:
            weaker = [replace(x, **{name: False}) if x is barrier else x for x in placed.commands]
            assert check(Recording("weaker", weaker)), f"nobody misses {name}"


def test_independent_dispatches_need_no_barrier() -> None:
    x, a, b = buffer(), buffer(), buffer()
    commands = [
        dispatch([view(x)], [view(a, 0, 32)]),
        dispatch([view(x)], [view(a, 32)]),
        dispatch([view(x)], [view(b)]),
    ]
    assert scopes(recording_of(*commands)) == [Scope.FROM_HOST]
    assert scopes(recording_of(*commands, dispatch([view(a)], [view(x)]))) == [Scope.FROM_HOST, Scope.DEVICE]


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (([], ["a"]), (["a"], ["b"]), "read-after-write"),
        (([], ["a"]), ([], ["a"]), "write-after-write"),
        ((["a"], ["b"]), ([], ["a"]), "write-after-read"),
    ],
)
def test_each_conflict_has_one_barrier_and_a_kind(
    first: tuple[list[str], list[str]], second: tuple[list[str], list[str]], kind: str
) -> None:
    buffers = {"a": buffer(), "b": buffer()}
    earlier, two = (
        dispatch([view(buffers[n]) for n in reads], [view(buffers[n]) for n in writes], label)
        for (reads, writes), label in ((first, "one"), (second, "two"))
    )
    placed = recording_of(earlier, two)
    assert scopes(placed) == [Scope.FROM_HOST, Scope.DEVICE]
    [hazard] = check(
        Recording(
            "", [c for c in placed.commands if not (isinstance(c, Barrier) and c.scope is Scope.DEVICE)]
        )
    )
    assert hazard.kind == kind and "one" in hazard.first and "two" in hazard.second and kind in str(hazard)


def test_bytes_that_do_not_overlap_do_not_conflict() -> None:
    a = buffer()
    assert scopes(recording_of(dispatch([], [view(a, 0, 8)]), dispatch([view(a, 8, 16)], []))) == [
        Scope.FROM_HOST
    ]
    assert len(scopes(recording_of(dispatch([], [view(a, 0, 9)]), dispatch([view(a, 8, 16)], [])))) == 2


@pytest.mark.parametrize(("first", "second", "n_barriers"), [(7, 7, 0), (7, 8, 1), (0, 0, 1), (0, 7, 1)])
def test_dispatches_of_one_output_need_no_barrier_if_they_write_different_parts(
    first: int, second: int, n_barriers: int
) -> None:
    """A read of the output waits for both dispatches, and the next write waits for the read."""
    x, y, z = (view(buffer(), 0, 16) for _ in range(3))
    writers = [replace(dispatch([x], [y]), apart=apart) for apart in (first, second, first)]
    recording = recording_of(*writers[:2], dispatch([y], [z]), writers[2])
    assert len(scopes(recording)) == 1 + n_barriers + 2
    assert not check(recording)
    bare = check(Recording("bare", [Barrier(Scope.FROM_HOST), *writers[:2]]))
    assert [hazard.kind for hazard in bare] == n_barriers * ["write-after-write"]


def test_an_update_in_place_is_a_hazard() -> None:
    a = buffer()
    assert [h.kind for h in check(recording_of(dispatch([view(a, 0, 8)], [view(a, 7, 9)])))] == ["in-place"]


@pytest.mark.parametrize("home", [Home.STAGING, Home.PAGES])
def test_host_memory_around_an_exchange(home: Home) -> None:
    host, local = buffer(home), buffer()
    write, read = dispatch([view(local)], [view(host)]), dispatch([view(host)], [view(local)])
    placed = recording_of(write, Exchange("reduce"), read)
    assert [type(c).__name__ if isinstance(c, Dispatch | Exchange) else c.scope for c in placed.commands] == [
        Scope.FROM_HOST, "Dispatch", Scope.TO_HOST, "Exchange", Scope.FROM_HOST, "Dispatch",
    ]  # fmt: skip
    kinds = {
        b.scope: {h.kind for h in check(crippled)} for b, crippled in list(without_each_barrier(placed))[1:]
    }
    assert kinds[Scope.TO_HOST] == {"host-read-after-device-write"}
    assert "device-access-after-host-write" in kinds[Scope.FROM_HOST]


def test_to_host_barrier_does_not_order_the_device() -> None:
    """A later segment waits only for FROM_HOST before it reads scratch of an earlier segment."""
    host, local, other = buffer(Home.PAGES), buffer(), buffer()
    placed = recording_of(
        dispatch([], [view(host), view(local)]), Exchange(), dispatch([view(local)], [view(other)])
    )
    assert not check(placed)
    *_, (barrier, crippled) = without_each_barrier(placed)
    assert barrier.scope is Scope.FROM_HOST and [h.kind for h in check(crippled)] == ["read-after-write"]


def test_step_params_count_as_read() -> None:
    a, params, y = buffer(), buffer(), buffer()
    reader = Dispatch("op", "f32", (view(y),), (0,), (), (), (1, 1, 1), step=view(params))
    assert scopes(recording_of(Copy(view(a), view(params)), reader)) == [Scope.FROM_HOST, Scope.DEVICE]


# ---- cuts ----


def heavy(seconds: float) -> Dispatch:
    return dispatch([view(buffer())], [view(buffer())], flops=int(seconds * SLOW.flops))


def n_cuts(recording: Recording, speed: float) -> int:
    cut = cut_long(recording, Pace(speed * SLOW.memory, speed * SLOW.host))
    return sum(isinstance(c, Cut) for c in cut.commands)


SPEEDS = st.sampled_from([0.01, 0.5, 1.0, 3.0, 100.0])


@given(st.lists(st.floats(0.01, 1.5), max_size=30))
def test_submissions_are_estimated_below_the_limit(costs: list[float]) -> None:
    """A submission with a single command may take longer than the limit."""
    recording = Recording("long", [heavy(cost) for cost in costs])
    cut = cut_long(recording)
    assert [c for c in cut.commands if not isinstance(c, Cut)] == recording.commands
    parts: list[list[Dispatch]] = [[]]
    for command in cut.commands:
        if isinstance(command, Cut):
            parts.append([])
        else:
            assert isinstance(command, Dispatch)
            parts[-1].append(command)
    for part in parts:
        assert len(part) <= 1 or sum(c.flops for c in part) <= SUBMISSION_S * SLOW.flops * (1 + 1e-9)
    for before, after in pairwise(parts):
        assert sum(c.flops for c in before) + after[0].flops > SUBMISSION_S * SLOW.flops * (1 - 1e-9)


@given(st.lists(st.one_of(st.just(Exchange()), st.floats(0.01, 1.5).map(heavy)), max_size=30), SPEEDS)
def test_cut_is_between_two_commands_of_a_segment(commands: list[Command], speed: float) -> None:
    cut = cut_long(Recording("long", commands), Pace(speed * SLOW.memory, speed * SLOW.host)).commands
    assert [c for c in cut if not isinstance(c, Cut)] == commands
    for i, command in enumerate(cut):
        if isinstance(command, Cut):
            assert 0 < i < len(cut) - 1 and all(isinstance(cut[j], Dispatch) for j in (i - 1, i + 1))


@given(st.lists(st.floats(0.01, 0.6), max_size=30), SPEEDS, SPEEDS)
def test_faster_device_has_no_more_cuts(costs: list[float], cost_a: float, other: float) -> None:
    recording = Recording("long", [heavy(cost) for cost in costs])
    few, many = (n_cuts(recording, speed) for speed in sorted((cost_a, other), reverse=True))
    assert few <= many


def test_cuts_use_the_longer_of_arithmetic_and_reads() -> None:
    many = Recording("arithmetic", [heavy(0.3)] * 12)
    assert [n_cuts(many, speed) for speed in (0.1, 0.5, 1, 2, 100)] == [11, 11, 11, 3, 0]
    for home, (memory, host), n in (
        (Home.WEIGHTS, (1e9, 1e12), 9),
        (Home.WEIGHTS, (1e12, 1e9), 0),
        (Home.HOST, (1e12, 1e9), 9),
        (Home.MAPPED, (1e12, 1e9), 9),
        (Home.PAGES, (1e9, 1e12), 0),
    ):
        weights = Buffer(400_000_000, home, "weights")
        reader = dispatch([View(weights, 0, (100_000_000,))], [view(buffer())])
        cut = cut_long(Recording("reads", [reader] * 10), Pace(memory, host))
        assert sum(isinstance(c, Cut) for c in cut.commands) == n, (home, memory, host)


def attention(seconds: float, heads: int, first: int = 0) -> Dispatch:
    push = ("n_heads", 64), (FIRST_HEAD, first), ("scale", 0.5)
    return replace(heavy(seconds), push=push, groups=(3, heads, 1))


@given(st.integers(1, 70), st.integers(0, 5), st.floats(0.01, 9))
def test_long_attention_is_split(heads: int, first: int, seconds: float) -> None:
    whole = attention(seconds, heads, first)
    parts = [c for c in cut_long(Recording("", [whole])).commands if isinstance(c, Dispatch)]
    assert len(parts) == min(heads, math.ceil(SLOW.seconds(whole) / SUBMISSION_S))
    for part in parts:
        push = dict(part.push)
        assert replace(part, push=whole.push, groups=whole.groups, flops=whole.flops) == whole
        assert push == {**dict(whole.push), FIRST_HEAD: first} and part.groups[::2] == (3, 1)
        first += part.groups[1]
        assert abs(part.flops / whole.flops - part.groups[1] / heads) < 1e-6
    assert first == whole.groups[1] + dict(whole.push)[FIRST_HEAD]


def test_other_ops_are_not_split() -> None:
    product = heavy(3.0)
    assert product.parts(6) == [product] and n_cuts(Recording("", [product]), 1) == 0


def test_an_exchange_starts_a_new_submission() -> None:
    recording = Recording("", [heavy(0.3), Exchange(), heavy(0.3), heavy(0.3)])
    assert [type(c) for c in cut_long(recording).commands] == [Dispatch, Exchange, Dispatch, Cut, Dispatch]


@settings(max_examples=examples(50), deadline=None)
@given(recordings())
def test_a_cut_orders_nothing(recording: Recording) -> None:
    """A cut between submissions does not order commands, and needs no new barriers."""
    commands: list = []  # type: ignore[type-arg]
    for command in recording.commands:
        commands += [Cut(), command] if commands and isinstance(command, Dispatch) else [command]
    placed = derive_barriers(Recording("", commands))
    assert not check(placed) and scopes(placed) == scopes(derive_barriers(recording))
    assert all(check(crippled) for _, crippled in without_each_barrier(placed))


# ---- placing ----


def test_place_moves_views_and_nothing_else() -> None:
    value, arena, fixed = Virtual(256, "v"), buffer(), buffer(label="fixed")
    recording = Recording("r")
    recording.copy(view(fixed, 0, 4), View(value, 8, (4,)))
    recording.dispatch(dispatch([View(value, 4, (2,))], [view(fixed)]))
    recording.exchange()
    placed = recording.place({value: View(arena, 64, (1,))})
    copy, moved, exchange = placed.commands
    assert isinstance(copy, Copy) and copy.src == view(fixed, 0, 4) and copy.dst == View(arena, 72, (4,))
    assert isinstance(moved, Dispatch) and moved.args == (View(arena, 68, (2,)), view(fixed))
    assert isinstance(exchange, Exchange) and len(placed.segments()) == 2


def test_a_copy_of_different_sizes_is_refused() -> None:
    with pytest.raises(AssertionError, match="copy of 16 B into 20 B"):
        Recording("r").copy(view(buffer(), 0, 4), view(buffer(), 0, 5))


def test_a_float_push_constant_may_be_given_as_an_int() -> None:
    recording, both = Recording("scale"), view(buffer(), 0, 64)
    Recorder(recording, Limits.floor()).scale(both, both, c=2)
    (dispatched,) = recording.accesses()
    assert isinstance(dispatched, Dispatch)
    assert push_constants(dispatched, [0, 0])[-4:] == struct.pack("f", 2.0)
