"""The pool loads models without engines, and makes room for them. Time passes only when a test moves the
clock, except for the deadline of waiting requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest
from pools import FakeMachine, entry, reached, refused, request, run, running, statuses

from vkbackend.errors import DeviceLost, GGUFError, OutOfDeviceMemory, UnsupportedModel
from vkbackend.models.options import Options
from vkbackend.tools.server.model import State
from vkbackend.tools.server.router.places import Place
from vkbackend.tools.server.router.registry import Entry

pytestmark = [pytest.mark.no_vulkan, pytest.mark.usefixtures("no_collection")]


ABC = [entry("a"), entry("b"), entry("c")]


def test_the_least_recently_used_model_makes_room() -> None:
    machine = FakeMachine()

    async def test() -> None:
        async with running(machine.pool(ABC)) as pool:
            for name in "abab":
                machine.now += 1
                async with request(pool, name):
                    pass
            assert [name for name, _ in machine.opened] == ["a", "b"]
            machine.now += 1
            async with request(pool, "a"), request(pool, "c"):
                assert statuses(pool) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
            assert pool.n_evictions == 1 and machine.most_held == {"gpu": 2}

    run(test)


def test_no_model_with_a_request_makes_room() -> None:
    """The request for c waits until a model's request has ended. Then c replaces this model."""
    machine = FakeMachine()

    async def test() -> None:
        async with running(machine.pool(ABC)) as pool:
            async with request(pool, "a"):
                async with request(pool, "b"):
                    waits = asyncio.ensure_future(pool.acquire(pool.tenants["c"]))
                    await reached(lambda: pool.tenants["c"].places)
                    pool.schedule()
                    assert statuses(pool) == {"a": "loaded", "b": "loaded", "c": "unloaded"}
                await waits
                assert statuses(pool) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
            pool.release(pool.tenants["c"])

    run(test)


def test_two_models_in_turn_with_room_for_one() -> None:
    """A request for another model arrives while a model loads, and while it answers."""
    machine = FakeMachine(shut={"a"})

    async def test() -> None:
        async with running(machine.pool(ABC, most=1, turn_s=30.0)) as pool:
            a, b = pool.tenants["a"], pool.tenants["b"]
            first = asyncio.ensure_future(pool.acquire(a))
            await reached(lambda: a.status.value == "loading")
            second = asyncio.ensure_future(pool.acquire(b))
            third = asyncio.ensure_future(pool.acquire(a))
            await asyncio.sleep(0.02)
            machine.gate.set()
            await asyncio.gather(first, third)  # both requests wait for the current load
            assert not second.done() and a.n_active == 2
            await pool.acquire(a)  # a loaded model admits requests immediately
            for _ in range(3):
                pool.release(a)
            await second
            assert statuses(pool)["a"] == "unloaded" and len(machine.opened) == 2
            pool.release(b)

    run(test)


def test_a_busy_model_admits_no_more_requests_after_its_turn() -> None:
    machine = FakeMachine()

    async def test() -> None:
        async with running(machine.pool(ABC, most=1, turn_s=30.0)) as pool:
            a, b = pool.tenants["a"], pool.tenants["b"]
            await pool.acquire(a)
            waits = asyncio.ensure_future(pool.acquire(b))
            await reached(lambda: b.places)
            machine.now = 29.0
            pool.schedule()
            assert a.admits
            machine.now = 31.0
            pool.schedule()
            assert not a.admits and a.n_active == 1 and a.model and a.model.state is State.READY
            late = asyncio.ensure_future(pool.acquire(a))
            await asyncio.sleep(0.01)
            assert not late.done() and not waits.done()
            pool.release(a)
            await waits
            pool.release(b)
            await late  # model a is loaded again when model b is idle
            assert [name for name, _ in machine.opened] == ["a", "b", "a"]
            pool.release(a)

    run(test)


def test_a_client_that_leaves_does_not_end_a_load() -> None:
    machine = FakeMachine(shut={"a"})

    async def test() -> None:
        async with running(machine.pool(ABC)) as pool:
            a = pool.tenants["a"]
            waits = asyncio.ensure_future(pool.acquire(a))
            await reached(lambda: a.status.value == "loading")
            waits.cancel()
            await asyncio.wait({waits})
            machine.gate.set()
            await reached(lambda: a.admits)
            assert a.n_active == 0 and not a.waiters

    run(test)


def test_a_waiting_request_has_a_deadline() -> None:
    machine = FakeMachine(shut={"a"})

    async def test() -> None:
        async with running(machine.pool(ABC, load_s=0.1)) as pool:
            refusal = await refused(pool.acquire(pool.tenants["a"]))
            assert (refusal.status, refusal.code, refusal.retry_s) == (503, "model_loading", 5)
            assert refusal.extra == {"state": "loading", "progress": 0.5}
            assert not pool.tenants["a"].waiters
            machine.gate.set()
            await reached(lambda: pool.tenants["a"].admits)

    run(test)


def test_a_limit_of_waiting_requests() -> None:
    machine = FakeMachine(shut={"a"})

    async def test() -> None:
        async with running(machine.pool(ABC, queue=1)) as pool:
            first = asyncio.ensure_future(pool.acquire(pool.tenants["a"]))
            await reached(lambda: pool.tenants["a"].waiters)
            assert (await refused(pool.acquire(pool.tenants["b"]))).status == 429
            machine.gate.set()
            await first
            pool.release(pool.tenants["a"])

    run(test)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (GGUFError("/models/a.gguf is cut"), 503, "model_load_failed"),
        (DeviceLost("the engine's process ended (exit code -9)"), 503, "model_load_failed"),
        (OutOfDeviceMemory("too large"), 503, "out_of_memory"),
        (UnsupportedModel("no such architecture"), 501, "model_load_failed"),
    ],
)
def test_a_model_that_cannot_be_loaded(error: Exception, status: int, code: str) -> None:
    """Each waiting request gets the reason, without folders. After a delay, the next request tries again."""
    # A model whose process is lost while it loads is tried again once.
    errors = [error, error] if isinstance(error, DeviceLost) else [error]
    machine = FakeMachine(shut={"a"}, errors={"a": errors})

    async def test() -> None:
        async with running(machine.pool(ABC)) as pool:
            a = pool.tenants["a"]
            waiting = [asyncio.ensure_future(refused(pool.acquire(a))) for _ in range(3)]
            await reached(lambda: len(a.waiters) == 3)
            machine.gate.set()
            for refusal in await asyncio.gather(*waiting):
                assert (refusal.status, refusal.code) == (status, code)
                assert "/models" not in str(refusal) and str(refusal).startswith("a cannot be loaded: ")
            assert statuses(pool)["a"] == "unloaded" and a.failure is error
            assert (await refused(pool.acquire(a))).code == code and not machine.opened
            machine.now += 1.1
            async with request(pool, "a"):
                assert a.failure is None

    run(test)


def test_a_process_that_is_killed_while_its_model_loads() -> None:
    machine = FakeMachine(errors={"a": [DeviceLost("the engine's process ended (exit code -9)")]})

    async def test() -> None:
        async with running(machine.pool(ABC)) as pool:
            async with request(pool, "a") as a:
                assert a.failure is None and len(machine.opened) == 1

    run(test)


def test_two_models_at_once_while_others_are_idle() -> None:
    machine = FakeMachine()
    entries = [entry(name) for name in "abcd"]

    async def test() -> None:
        async with running(machine.pool(entries)) as pool:
            async with request(pool, "a"), request(pool, "b"):
                pass
            await asyncio.gather(*(pool.acquire(pool.tenants[name]) for name in "cd"))
            assert statuses(pool) == {"a": "unloaded", "b": "unloaded", "c": "loaded", "d": "loaded"}
            for name in "cd":
                pool.release(pool.tenants[name])

    run(test)


def test_a_device_that_is_fuller_than_planned() -> None:
    """Another program holds memory. An idle model is unloaded to make room, so no request fails, and the
    budget recovers."""
    machine = FakeMachine(errors={"b": [OutOfDeviceMemory("full")]})

    async def test() -> None:
        async with running(machine.pool(ABC, budget=3)) as pool:
            async with request(pool, "a"):
                pass
            async with request(pool, "b"):
                assert statuses(pool) == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
            await pool.unload(pool.tenants["b"])
            async with request(pool, "a"), request(pool, "b"), request(pool, "c"):
                assert machine.held == {"gpu": 3}

    run(test)


def test_a_model_larger_than_the_budget() -> None:
    machine = FakeMachine(nbytes={"a": 3})

    def plan(wanted: object, left: object) -> list[object]:
        raise OutOfDeviceMemory("the model needs 3 MiB of gpu, where models may hold 2 MiB")

    async def test() -> None:
        machine.plan = plan  # type: ignore[method-assign, assignment]
        async with running(machine.pool(ABC)) as pool:
            assert (await refused(pool.acquire(pool.tenants["a"]))).code == "out_of_memory"

    run(test)


def test_a_model_with_fit_is_planned_with_what_is_left() -> None:
    machine, lefts = FakeMachine(), list[int]()

    def plan(wanted: Entry, left: Mapping[str, int]) -> list[Place]:
        if not wanted.options.fit:
            return [Place(("gpu",), {"gpu": 1}, 1.0)]
        lefts.append(left["gpu"])
        return [Place(("gpu",), {"gpu": max(1, left["gpu"])}, 1.0)]

    async def test() -> None:
        machine.plan = plan  # type: ignore[method-assign]
        fits = replace(entry("f"), options=Options("/models/f.gguf", fit=True))  # type: ignore[arg-type]
        async with running(machine.pool([entry("a"), fits], 3)) as pool:
            async with request(pool, "a"), request(pool, "f"):
                assert machine.held == {"gpu": 3}
            await pool.unload(pool.tenants["f"])
            await pool.unload(pool.tenants["a"])
            async with request(pool, "f"):
                assert machine.held == {"gpu": 3}
            async with request(pool, "a"):  # evicts f
                assert statuses(pool) == {"a": "loaded", "f": "unloaded"}
                async with request(pool, "f"):
                    assert machine.held == {"gpu": 3}
        assert lefts == [2, 3, 2]

    run(test)


def test_models_go_to_the_device_that_is_fastest_for_them() -> None:
    """Models on one device share its speed."""
    machine = FakeMachine(speeds={"fast": 2.5, "slow": 1.0})
    entries = [entry(name) for name in "abcd"] + [entry("e", devices=("slow",))]

    async def test() -> None:
        async with running(machine.pool(entries, budget=3, most=0)) as pool:
            for name in "abcde":
                async with request(pool, name):
                    pass
            assert dict(machine.opened) == {"a": "fast", "b": "fast", "c": "slow", "d": "fast", "e": "slow"}
            assert pool.n_evictions == 0

    run(test)


def test_equal_devices_get_a_model_each() -> None:
    machine = FakeMachine(speeds={"gpu0": 1.0, "gpu1": 1.0})

    async def test() -> None:
        async with running(machine.pool(ABC)) as pool:
            async with request(pool, "a"), request(pool, "b"):
                assert sorted(dict(machine.opened).values()) == ["gpu0", "gpu1"]

    run(test)


def test_a_small_model_waits_behind_a_large_one_only_for_the_same_device() -> None:
    """This order keeps small models from taking the memory that a large model waits for."""
    machine = FakeMachine(nbytes={"a": 2, "b": 2}, speeds={"gpu0": 1.0, "gpu1": 1.0})
    entries = [entry("a", devices=("gpu0",)), entry("b", devices=("gpu0",)), entry("c", devices=("gpu0",))]
    entries.append(entry("d", devices=("gpu1",)))

    async def test() -> None:
        async with running(machine.pool(entries, budget=3)) as pool:
            await pool.acquire(pool.tenants["a"])
            large = asyncio.ensure_future(pool.acquire(pool.tenants["b"]))
            await reached(lambda: pool.tenants["b"].places)
            machine.now += 1
            small = asyncio.ensure_future(pool.acquire(pool.tenants["c"]))
            await pool.acquire(pool.tenants["d"])
            await reached(lambda: pool.tenants["c"].places)
            pool.schedule()
            assert not large.done() and not small.done()
            pool.release(pool.tenants["a"])
            await asyncio.gather(large, small)
            for name in "bcd":
                pool.release(pool.tenants[name])

    run(test)


def test_a_new_list() -> None:
    machine = FakeMachine()

    async def test() -> None:
        async with running(machine.pool(ABC)) as pool:
            kept, gone = pool.tenants["a"], pool.tenants["b"]
            await pool.acquire(gone)
            async with request(pool, "a"):
                pass
            pool.relist([entry("a"), entry("d")])
            assert pool.tenants["a"] is kept and kept.admits and set(pool.tenants) == {"a", "d"}
            assert machine.held == {"gpu": 2} and gone.model and gone.model.state is State.READY
            pool.release(gone)
            await reached(lambda: machine.held == {"gpu": 1})
            assert (await refused(pool.acquire(gone))).status == 404

    run(test)


def test_without_loading_on_request() -> None:
    machine = FakeMachine()

    async def test() -> None:
        async with running(machine.pool([entry("a", loads=True), entry("b")], loads=False)) as pool:
            assert (await refused(pool.acquire(pool.tenants["b"]))).code == "model_not_loaded"
            async with request(pool, "a"), request(pool, "b", loads=True):
                pass

    run(test)
