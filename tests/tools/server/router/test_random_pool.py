"""Random requests, cancels, loads, unloads and losses, with models that have no engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from pools import FakeMachine, entry, request, running

from vkbackend.errors import DeviceLost
from vkbackend.tools.server.failures import Refusal
from vkbackend.tools.server.model import Model, State
from vkbackend.tools.server.router.pool import Pool

pytestmark = [pytest.mark.no_vulkan, pytest.mark.usefixtures("no_collection")]


def actions(seed: int, n: int, pool: Pool, machine: FakeMachine) -> Callable[[], Awaitable[None]]:
    """Return a test of `n` random actions with five models, with checks after each action."""
    draw = random.Random(seed)
    asked = ended = 0

    def check() -> None:
        for device, nbytes in machine.most_held.items():
            assert nbytes <= 2, (device, nbytes)
        for tenant in pool.tenants.values():
            assert tenant.n_active >= 0
            if tenant.n_active and not tenant.is_closing:
                assert tenant.is_open

    async def ask(name: str) -> None:
        """A request ends with an answer of its own model, or with a refusal."""
        nonlocal asked, ended
        asked += 1
        try:
            async with request(pool, name) as tenant:
                model = tenant.model
                assert model is not None
                for _ in range(draw.randrange(4)):
                    await asyncio.sleep(draw.random() / 500)
                    assert model.state is not State.ENDED or model in cut
        except Refusal:
            pass
        finally:
            ended += 1

    cut: set[Model | None] = set()  # models whose requests may be ended by a request to unload the model

    async def unload(name: str) -> None:
        cut.add(pool.tenants[name].model)
        with suppress(Refusal):
            await pool.unload(pool.tenants[name])

    async def test() -> None:
        async with running(pool):
            tasks: list[asyncio.Task[None]] = []
            for _ in range(n):
                name, chance = draw.choice("abcde"), draw.random()
                machine.now += draw.choice((0.0, 0.1, 5.0))
                if chance < 0.75:
                    tasks.append(asyncio.ensure_future(ask(name)))
                elif chance < 0.82 and tasks:
                    draw.choice(tasks).cancel()
                elif chance < 0.87:
                    tasks.append(asyncio.ensure_future(unload(name)))
                elif chance < 0.92:
                    with suppress(Refusal):
                        pool.load(pool.tenants[name])
                elif chance < 0.96:
                    machine.errors.setdefault(name, []).append(DeviceLost("the process ended"))
                elif (models := machine.models.get(name)) and (model := pool.tenants[name].model):
                    models[-1].lost = DeviceLost("gone")
                    model.failed(models[-1].lost, models[-1])  # type: ignore[arg-type]
                await asyncio.sleep(draw.random() / 500)
                check()
            await asyncio.wait(tasks)
            for task in tasks:
                assert task.cancelled() or task.exception() is None, task.exception()
            assert ended == asked and not any(tenant.waiters for tenant in pool.tenants.values())
            assert not any(tenant.n_active for tenant in pool.tenants.values())
        assert sum(machine.held.values()) == 0

    return test


def soak(seed: int, n: int) -> None:
    draw = random.Random(seed)
    sizes = {name: draw.choice((1, 1, 2)) for name in "abcde"}
    machine = FakeMachine(nbytes=sizes, speeds={"gpu0": 2.0, "gpu1": 1.0})
    entries = [entry(name, idle_s=draw.choice((-1.0, 3.0)), stop_s=0.5) for name in "abcde"]
    pool = machine.pool(entries, most=draw.choice((0, 2, 3)), load_s=20.0, turn_s=draw.choice((0.0, 6.0)))
    asyncio.run(asyncio.wait_for(actions(seed, n, pool, machine)(), 60))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.wide) for n in (1, 2))])
def test_random_requests(seed: int) -> None:
    """Memory stays within the budget, no answer is truncated except by request, and every request ends."""
    soak(seed, 100)


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(100, 140))
def test_many_random_requests(seed: int) -> None:
    soak(seed, 500)
