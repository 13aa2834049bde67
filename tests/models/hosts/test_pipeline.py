"""Nodes can form a pipeline in which several steps are in flight. The steps overlap, never deadlock, and
produce the same tokens as a single node."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import wide
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.fixture import write
from oracles.fixtures import build
from random_cases import examples
from runners import load_runner
from scheduling import GREEDY, Everything, events_of, finish, make, tokens_of
from tiny_models import Tiny, write_tiny

from vkbackend.errors import DeviceLost
from vkbackend.meta.step_kind import Wanted
from vkbackend.meta.transport import TwinTransport, _TwinTransfers
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Cancel, CopySlot, Event, Generate, Logits, SaveState
from vkbackend.models.engine.runner.micro_batch import MicroBatch
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.hosts import following
from vkbackend.models.options import Options
from vkbackend.step import Run
from vkbackend.tools.measure.twin_nodes import twin_runner
from vkbackend.twins.device import NumpyDevice

pytestmark = pytest.mark.no_vulkan

TOKENS = np.random.default_rng(3).integers(3, 120, 300).tolist()
OPTIONS: dict[str, Any] = {
    "n_ctx": 96, "n_slots": 4, "n_ubatch": 64, "kv_cells": 256, "reduce_type": "f32", "split_mode": "layer",
}  # fmt: skip
TWO, THREE = ["0/numpy", "1/numpy"], ["0/numpy", "1/numpy", "2/numpy"]


def engine_of(runner: Runner) -> Engine:
    return Engine(runner, Everything())


def requests(n: int, n_tokens: int = 8) -> list[Any]:
    return [Generate(i, tuple(TOKENS[i : i + 3 + 5 * i]), n_tokens, GREEDY) for i in range(n)]


def alone(path: Path, wanted: list[Any], **options: Any) -> dict[int, list[int]]:
    runner = load_runner(path, devices=["numpy"], **OPTIONS | options)
    try:
        return {r.id: tokens_of(finish(engine_of(runner), [r])[r.id]) for r in wanted}
    finally:
        runner.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "model.gguf", Tiny("llama", n_layer=3))


# ---- the number of steps in flight ----


@pytest.mark.parametrize(
    ("places", "n_hosts", "options", "n_in_flight"),
    [
        (TWO, 2, {}, 2),
        (THREE, 3, {}, 3),
        pytest.param(["0/numpy", "0/numpy", "1/numpy"], 2, {}, 2, marks=pytest.mark.wide),
        (["1/numpy", "0/numpy"], 2, {}, 1),  # node 0 has the last layers
        (TWO, 2, {"split_mode": "tensor"}, 1),
        (THREE, 3, {"tensor_split": [1, 0, 1]}, 2),
        ([*TWO, "1/numpy"], 2, {"split_mode": "hosts"}, 2),
    ],
    ids=str,
)
def test_steps_in_flight_by_hosts(
    llama: Path, places: list[str], n_hosts: int, options: Any, n_in_flight: int
) -> None:
    with twin_runner(llama, places, n_hosts, **OPTIONS | options) as runner:
        assert runner.n_in_flight == n_in_flight


def test_each_step_has_its_share_of_the_sequences() -> None:
    for n_in_flight in (1, 2, 3):
        engine, runner = make(n_slots=7, n_in_flight=n_in_flight)
        for i in range(7):
            engine.submit(Generate(i, (i,), 12, GREEDY))
        for _ in range(9):
            engine.step()
        share = -(-7 // n_in_flight)
        assert {len(runs) for runs in runner.steps} <= {share, 7 - share * (n_in_flight - 1)}
        assert runner.most_in_flight == n_in_flight
        finish(engine, [])


def test_one_sequence_does_not_wait_for_others() -> None:
    """With two steps in flight, a single sequence needs as many steps as with one, and gets its tokens in the
    same calls."""
    calls = []
    for n_in_flight in (1, 2):
        engine, runner = make(n_in_flight=n_in_flight)
        engine.submit(Generate(0, (1, 2, 3), 10, GREEDY))
        brought = [bool(engine.step()) for _ in range(10)]
        calls.append((brought, len(runner.steps), engine.busy))
    assert calls[0] == calls[1] == ([True] * 10, 10, False)


# ---- overlap ----


def test_hosts_compute_different_steps_at_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test lets node 1 end a step only after node 0 has computed its part of the next step."""
    begun, ended, together = Counter[int](), Counter[int](), 0
    state = threading.Condition()
    real, leader = NumpyDevice.execute, threading.get_ident()

    def execute(self: NumpyDevice, command: Any) -> None:
        nonlocal together
        real(self, command)
        label = getattr(command, "label", "")
        host = int(threading.get_ident() != leader)
        if label == ("output.weight" if host else "blk.0.attn_q.weight"):
            with state:
                (ended if host else begun)[host] += 1
                state.notify_all()
                together += host and state.wait_for(lambda: begun[0] > ended[1], timeout=5.0)

    with twin_runner(llama, TWO, **OPTIONS | {"prefix_cache": False}) as runner:
        engine, wanted = engine_of(runner), requests(4)
        # record the steps first, because nodes wait for each other while they record
        finish(engine, wanted)
        monkeypatch.setattr(NumpyDevice, "execute", execute)
        finish(engine, wanted)
        monkeypatch.undo()
    assert (ended[1], together) == (16, 15)


# ---- no deadlock ----


class Rendezvous(_TwinTransfers):
    """Transfers that send only after the receiver has posted its buffer, as MPI does with long messages."""

    posted, sent = Counter[Any](), Counter[Any]()

    def start(self) -> None:
        here = self._transport.rank
        self.posted.update((host, here, self._lane) for host, _ in self._received)
        super().start()

    def finish(self) -> None:
        here = self._transport.rank
        for host, _ in self._sent:
            key = here, host, self._lane
            self.sent[key] += 1
            self._transport.wait(lambda key=key: self.posted[key] >= self.sent[key], "a receiver")  # type: ignore
        super().finish()


@pytest.mark.parametrize("places", [THREE, wide(pytest.param(TWO))], ids=str)
def test_long_messages_do_not_deadlock(
    llama: Path, places: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VKBACKEND_TIMEOUT", "20")
    monkeypatch.setattr(Rendezvous, "posted", Counter())
    monkeypatch.setattr(Rendezvous, "sent", Counter())
    monkeypatch.setattr(TwinTransport, "transfers", lambda self, *a: Rendezvous(self, *a))
    wanted = requests(5, 8)
    want = alone(llama, wanted)
    with twin_runner(llama, places, len(places), **OPTIONS) as runner:
        engine = engine_of(runner)
        events: dict[int, list[Event]] = {}
        for request in wanted:
            engine.submit(request)
            for event in events_of(engine.step()):
                events.setdefault(event.id, []).append(event)
            assert len(runner.memory()) == len(places)
        for id_, more in finish(engine, [Logits(90, tuple(TOKENS[:40]))]).items():
            events.setdefault(id_, []).extend(more)
    assert {i: tokens_of(events[i]) for i in want} == want


# ---- results ----


def test_tokens_with_slices_within_hosts(llama: Path) -> None:
    """The devices of one node exchange sums in each layer while the other node computes another step."""
    options, wanted = OPTIONS | {"split_mode": "hosts"}, requests(4, 8)
    with pytest.MonkeyPatch.context() as patch:  # this single node pretends to be two nodes
        patch.setattr(Options, "nodes", ("0", "0", "1", "1"))
        single = load_runner(llama, devices=["numpy"] * 4, **options)
    want = {r.id: tokens_of(finish(engine_of(single), [r])[r.id]) for r in wanted}
    single.close()
    with twin_runner(llama, ["0/numpy", "0/numpy", "1/numpy", "1/numpy"], **options) as runner:
        assert runner.n_in_flight == 2
        events = finish(engine_of(runner), wanted)
        assert {r.id: tokens_of(events[r.id]) for r in wanted} == want


def test_candidates_masks_and_logits_of_steps_in_flight(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model.gguf", Tiny("llama", n_vocab=5000, n_layer=2))
    masks = np.random.default_rng(0).integers(0, 1 << 32, (2, -(-5000 // 32)), np.uint32)
    steps: list[tuple[MicroBatch, Wanted]] = [
        (MicroBatch([5, 6, 7, 8], [Run(0, 0, 3, 0), Run(1, 3, 1, 0)], [2, 3], masks), Wanted(40, True)),
        (MicroBatch([9, 4], [Run(2, 0, 2, 0)], [1]), Wanted()),
        (MicroBatch([5, 6], [Run(0, 0, 1, 3), Run(1, 1, 1, 1)], [0, 1]), Wanted(1)),
        (MicroBatch([8], [Run(2, 0, 1, 2)], [0], masks[:1]), Wanted(40)),
        (MicroBatch([3, 3], [Run(3, 0, 2, 0)], []), Wanted()),
    ]

    def copied(rows: Any) -> list[Any]:
        return [None if array is None else array.copy() for array in rows]

    single = load_runner(path, devices=["numpy"], **OPTIONS)
    want = [copied(single.collect(single.launch(*step))) for step in steps]
    single.close()
    with twin_runner(path, TWO, **OPTIONS) as runner:
        got = []
        flights = [runner.launch(*steps[0])]
        for step in steps[1:]:
            flights.append(runner.launch(*step))
            got.append(copied(runner.collect(flights.pop(0))))
        got.append(copied(runner.collect(flights.pop(0))))
        flights.append(runner.launch(*steps[0]))  # no call collects the results of this step
    for ours, theirs in zip(got, want, strict=True):
        assert [a is None for a in ours] == [b is None for b in theirs]
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None)


@pytest.mark.parametrize("name", [wide(pytest.param("llama", id="llama")), "qwen35"])
def test_slots_are_read_and_copied_after_steps_in_flight(tmp_path: Path, name: str) -> None:
    path = write(build(name), tmp_path / "model.gguf")

    def run(runner: Runner) -> dict[int, list[int]]:
        engine, got = engine_of(runner), dict[int, list[int]]()
        for request in requests(3, 20):
            engine.submit(request)
        for _ in range(12):
            engine.step()
        engine.submit(CopySlot(50, 2, 3))
        engine.submit(SaveState(51, str(tmp_path / "state"), 1))
        events = finish(engine, [])
        held = next(event.tokens for event in events[50] if event.tokens)
        assert not any(event.error for id_ in (50, 51) for event in events[id_])
        got[2] = list(held)
        more = Generate(60, (*held, 7), 6, GREEDY, slot=3)
        got[60] = tokens_of(finish(engine, [more])[60])
        return got

    with twin_runner(path, TWO, **OPTIONS | {"kv_cells": 384}) as runner:
        got = run(runner)
    prompt = (*got[2], 7)
    want = alone(path, [Generate(2, requests(3)[2].tokens, 20, GREEDY), Generate(60, prompt, 6, GREEDY)])
    n = len(requests(3)[2].tokens)
    assert got[60] == want[60] and got[2][n:] == want[2][: len(got[2]) - n] and len(got[2]) > n + 4


@pytest.fixture(scope="module")
def pair(llama: Path) -> Iterator[tuple[Runner, Runner]]:
    single = load_runner(llama, devices=["numpy"], **OPTIONS | {"prefix_cache": False})
    with twin_runner(llama, TWO, **OPTIONS) as runner:
        yield runner, single
    single.close()


@settings(max_examples=examples(3), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 30))
def test_concurrent_requests_get_the_same_tokens_as_alone(pair: tuple[Runner, Runner], seed: int) -> None:
    """The requests have common prefixes, and the cache has few cells. Some requests are cancelled while steps
    are in flight."""
    rng, (runner, single) = random.Random(seed), pair
    engine, wanted, got, gone = engine_of(runner), [], dict[int, list[Event]](), set[int]()
    for i in range(rng.randint(3, 9)):
        tokens = (*TOKENS[: rng.randint(0, 66)], *rng.choices(range(3, 120), k=rng.randint(1, 8)))
        wanted.append(Generate(i, tokens, rng.randint(1, 20), GREEDY, priority=rng.randint(-1, 1)))
        engine.submit(wanted[-1])
        for _ in range(rng.randint(0, 6)):
            for event in events_of(engine.step()):
                got.setdefault(event.id, []).append(event)
        if rng.random() < 0.3:
            gone.add(rng.randrange(i + 1))
            engine.submit(Cancel(max(gone)))
    for id_, more in finish(engine, []).items():
        got.setdefault(id_, []).extend(more)
    for request in wanted:
        have, want = tokens_of(got.get(request.id, [])), finish(engine_of(single), [request])[request.id]
        assert have == tokens_of(want) or (request.id in gone and have == tokens_of(want)[: len(have)])


# ---- lost nodes ----


def test_a_lost_host_ends_all_steps_in_flight(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = following._step, iter([True] * 9)

    def step(*args: Any) -> None:
        if not next(left, False):
            raise DeviceLost("numpy was lost")
        real(*args)

    monkeypatch.setattr(following, "_step", step)
    with pytest.raises(AssertionError, match="numpy was lost"), twin_runner(llama, TWO, **OPTIONS) as runner:
        engine = engine_of(runner)
        events = finish(engine, requests(4, 40))
        assert [events[i][-1].error.kind for i in range(4)] == ["DeviceLost"] * 4  # type: ignore[union-attr]
        later = finish(engine, [Generate(9, (5,), 2, GREEDY)])
        assert later[9][-1].error is not None and not engine.busy
