"""Models leave the pool: by name, after idle time, when their process dies, and when the pool closes."""

from __future__ import annotations

import asyncio

import pytest
from pools import FakeMachine, entry, reached, refused, request, run, running, statuses

from vkbackend.errors import DeviceLost, GGUFError
from vkbackend.tools.server import model
from vkbackend.tools.server.failures import Refusal
from vkbackend.tools.server.model import State

pytestmark = [pytest.mark.no_vulkan, pytest.mark.usefixtures("no_collection")]


ABC = [entry("a"), entry("b"), entry("c")]


def test_unloading_by_name() -> None:
    """Running requests may end. Later requests load the model again."""
    machine = FakeMachine()

    async def test() -> None:
        async with running(machine.pool(ABC)) as pool:
            a = pool.tenants["a"]
            assert (await refused(pool.unload(a))).status == 400
            await pool.acquire(a)
            unloads = asyncio.ensure_future(pool.unload(a))
            await reached(lambda: a.is_closing)
            assert machine.held == {"gpu": 1} and a.model and a.model.state is State.READY
            late = asyncio.ensure_future(pool.acquire(a))
            pool.release(a)
            await unloads
            await late
            assert len(machine.opened) == 2
            pool.release(a)
            pool.load(pool.tenants["b"])
            await reached(lambda: pool.tenants["b"].admits)
            with pytest.raises(Refusal, match="loaded already"):
                pool.load(pool.tenants["b"])

    run(test)


def test_unloading_cuts_requests_after_a_while() -> None:
    machine = FakeMachine()

    async def test() -> None:
        async with running(machine.pool([entry("a", stop_s=0.05)])) as pool:
            a = pool.tenants["a"]
            await pool.acquire(a)
            model = a.model
            await pool.unload(a)
            assert model and model.state is State.ENDED and "was unloaded" in str(model.not_ready())
            assert machine.held == {"gpu": 0}
            pool.release(a)

    run(test)


def test_unloading_a_model_that_loads() -> None:
    machine = FakeMachine(shut={"a"})

    async def test() -> None:
        async with running(machine.pool(ABC)) as pool:
            a = pool.tenants["a"]
            waits = asyncio.ensure_future(refused(pool.acquire(a)))
            await reached(lambda: a.status.value == "loading")
            await pool.unload(a)
            assert "unloaded while it was loading" in str(await waits)
            assert statuses(pool)["a"] == "unloaded" and not machine.held

    run(test)


def test_idle_models_sleep() -> None:
    machine = FakeMachine()

    async def test() -> None:
        async with running(machine.pool([entry("a", idle_s=10.0), entry("b")])) as pool:
            a = pool.tenants["a"]
            async with request(pool, "b"), request(pool, "a"):
                machine.now = 20.0
            machine.now = 29.0
            await pool.acquire(a)
            pool.release(a, counts=False)  # /props does not count
            pool._sleep_idle()
            assert a.admits
            machine.now = 30.5
            await reached(lambda: a.status.value == "sleeping")
            assert machine.held == {"gpu": 1} and pool.tenants["b"].admits
            async with request(pool, "a"):
                assert a.status.value == "loaded"

    run(test)


def test_a_model_that_dies_is_opened_again() -> None:
    """The running request continues to hold the model's memory, and later requests wait."""
    machine = FakeMachine()

    async def test() -> None:
        async with running(machine.pool(ABC)) as pool:
            a = pool.tenants["a"]
            await pool.acquire(a)
            machine.shut.add("a")
            lost = machine.models["a"][0]
            lost.lost = DeviceLost("gone")
            assert a.model is not None
            a.model.failed(lost.lost, lost)  # type: ignore[arg-type]
            await reached(lambda: not a.admits)
            late = asyncio.ensure_future(pool.acquire(a))
            await asyncio.sleep(0.01)
            assert not late.done()
            machine.gate.set()
            await late
            assert a.n_active == 2 and len(machine.opened) == 2 and machine.held == {"gpu": 1}
            pool.release(a)
            pool.release(a)

    run(test)


def test_a_model_that_dies_and_cannot_be_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's file was removed while the model was loaded. Its requests end, and its memory becomes
    free."""
    monkeypatch.setattr(model, "FIRST_WAIT_S", 0.001)
    machine = FakeMachine(errors={"a": []})

    async def test() -> None:
        async with running(machine.pool(ABC, budget=1)) as pool:
            a = pool.tenants["a"]
            async with request(pool, "a"):
                lost, opened = machine.models["a"][0], a.model
                assert opened is not None
                machine.errors["a"] = [GGUFError("no such file") for _ in range(model.MOST_FAILED)]
                lost.lost = DeviceLost("gone")
                opened.failed(lost.lost, lost)  # type: ignore[arg-type]
                late = await refused(opened.reopened(lost))  # type: ignore[arg-type]
                assert late.status == 503 and "cannot be opened again" in str(late)
            assert not machine.errors["a"]
            async with request(pool, "b"):
                assert a.status.value == "unloaded" and "no such file" in a.message
            machine.now = 2.0
            async with request(pool, "a"):
                assert len(machine.models["a"]) == 2

    run(test)


def test_closing_ends_loads_and_waiting_requests() -> None:
    machine = FakeMachine(shut={"b"})

    async def test() -> None:
        pool = machine.pool(ABC)
        async with running(pool):
            async with request(pool, "a"):
                pass
            waits = asyncio.ensure_future(refused(pool.acquire(pool.tenants["b"])))
            await reached(lambda: pool.tenants["b"].status.value == "loading")
            pool.close()
            assert (await waits).status == 503
        assert machine.held == {"gpu": 0}
        assert (await refused(pool.acquire(pool.tenants["a"]))).status == 503

    run(test)
