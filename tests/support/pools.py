"""A pool of models without engines, on a machine with one or several devices."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from serving import HANG_S, FakeModel

from vkbackend.meta.load import Progress
from vkbackend.models.options import Options
from vkbackend.tools.server.failures import Refusal
from vkbackend.tools.server.front import Config
from vkbackend.tools.server.router.places import Place
from vkbackend.tools.server.router.pool import Pool, PoolSettings
from vkbackend.tools.server.router.registry import Entry
from vkbackend.tools.server.router.tenant import Tenant


def entry(name: str, **options: Any) -> Entry:
    config = Config(f"/models/{name}.gguf", name, logs_requests=False, shows_metrics=True)
    return Entry(name, Options(f"/models/{name}.gguf"), config, fingerprint=name, **options)


@dataclass
class FakeMachine:
    """`nbytes` contains the bytes of each model, and `speeds` the speeds of devices. Models in `shut` wait
    for `gate` while they load. `errors` lists the errors of the next loads."""

    nbytes: Mapping[str, int] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=lambda: {"gpu": 1.0})
    shut: set[str] = field(default_factory=set)
    errors: dict[str, list[Exception]] = field(default_factory=dict)
    models: dict[str, list[FakeModel]] = field(default_factory=dict)
    opened: list[tuple[str, str]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    held: dict[str, int] = field(default_factory=dict)
    most_held: dict[str, int] = field(default_factory=dict)
    now: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def plan(self, wanted: Entry, left: Mapping[str, int]) -> list[Place]:
        size = self.nbytes.get(wanted.name, 1)
        devices = wanted.devices or tuple(self.speeds)
        places = [Place((device,), {device: size}, self.speeds[device]) for device in devices]
        return sorted(places, key=lambda place: -place.speed)

    def open(self, wanted: Entry, place: Place, progress: Progress) -> Any:
        machine, device = self, place.devices[0]
        progress(1, 2)
        if wanted.name in self.shut:
            for _ in range(int(HANG_S / 0.005)):
                if self.gate.wait(0.005):
                    break
                progress(1, 2)
        if errors := self.errors.get(wanted.name):
            raise errors.pop(0)
        size = place.held[device]
        with self._lock:
            self.held[device] = self.held.get(device, 0) + size
            self.most_held[device] = max(self.most_held.get(device, 0), self.held[device])

        class Loaded(FakeModel):
            is_closed = False

            def close(self) -> None:
                with machine._lock:
                    if not self.is_closed:
                        machine.held[device] -= size
                    self.is_closed = True

        model = Loaded(letter=wanted.name[0])
        self.models.setdefault(wanted.name, []).append(model)
        self.opened.append((wanted.name, device))
        return model

    def pool(self, entries: Sequence[Entry], budget: int | Mapping[str, int] = 2, **settings: Any) -> Pool:
        budgets = dict.fromkeys(self.speeds, budget) if isinstance(budget, int) else dict(budget)
        return Pool(entries, self.plan, self.open, budgets, PoolSettings(**settings), clock=lambda: self.now)


@asynccontextmanager
async def running(pool: Pool) -> AsyncIterator[Pool]:
    task = asyncio.ensure_future(pool.run())
    try:
        yield pool
    finally:
        pool.close()
        await asyncio.wait_for(task, HANG_S)


async def reached(condition: Any) -> None:
    """Wait until the condition holds, or until a deadline that only a deadlock exceeds."""
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def request(pool: Pool, name: str, **options: Any) -> AsyncIterator[Tenant]:
    tenant = pool.tenants[name]
    await pool.acquire(tenant, **options)
    try:
        yield tenant
    finally:
        pool.release(tenant)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


async def refused(awaited: Awaitable[object]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        await awaited
    return caught.value


def statuses(pool: Pool) -> dict[str, str]:
    return {name: tenant.status.value for name, tenant in pool.tenants.items()}
