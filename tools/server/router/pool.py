"""Loads and unloads models within the machine's memory.

Only the event loop changes a tenant, and `schedule` decides without waiting, so no two decisions conflict. A
model with admitted requests is never unloaded to make room.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vkbackend.errors import DeviceLost, OutOfDeviceMemory, VkbackendError
from vkbackend.meta.load import Progress
from vkbackend.models.arguments import HOST
from vkbackend.models.llm import LLM
from vkbackend.tools.server.failures import Refusal
from vkbackend.tools.server.model import Model, in_thread
from vkbackend.tools.server.router.places import Place
from vkbackend.tools.server.router.registry import Entry
from vkbackend.tools.server.router.room import Room, held_by
from vkbackend.tools.server.router.tenant import Status, Tenant, Waiter

TICK_S = 0.25  # Idle models and long waits are noticed within this time.
MOVED = "the model was unloaded; send the request again"

log = logging.getLogger("vkbackend.serve")
Open = Callable[[Entry, Place, Progress], LLM]
Plan = Callable[[Entry, Mapping[str, int]], list[Place]]


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """`most` limits the number of loaded models (0: no limit). While another model waits, a loaded model
    admits requests for `turn_s`. `load_s` is the deadline of a waiting request."""

    most: int = 4
    loads: bool = True  # Requests load their model.
    load_s: float = 300.0
    turn_s: float = 30.0
    queue: int = 256  # At most this many requests wait.


class Pool:
    """`plan` returns the places of a model, the fastest first. `plan` gets the bytes that are left on each
    device. Only a model with `--fit` needs this number. `budgets` are bytes by device."""

    def __init__(
        self,
        entries: Iterable[Entry],
        plan: Plan,
        open_: Open,
        budgets: Mapping[str, int],
        settings: PoolSettings = PoolSettings(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._open, self._clock = plan, open_, clock
        self.settings = settings
        self._budgets, self._left = dict(budgets), dict(budgets)
        self.tenants: dict[str, Tenant] = {}
        self.n_loads = self.n_evictions = 0
        self.load_s = 0.0  # Seconds spent loading.
        self._is_ending = False
        self._gone: set[Tenant] = set()  # No longer listed, but not closed yet.
        self._tasks: set[asyncio.Task[None]] = set()
        self.relist(entries)
        for tenant in self.tenants.values():
            if tenant.entry.loads:
                tenant.wanted_at = clock()

    # ---- the list ----

    def relist(self, entries: Iterable[Entry]) -> None:
        """Replace the list. Models that are gone or changed are unloaded when their requests have ended."""
        wanted = {entry.name: entry for entry in entries}
        for name, tenant in list(self.tenants.items()):
            entry = wanted.get(name)
            if entry is not None and entry.fingerprint == tenant.entry.fingerprint:
                tenant.retry_at = 0.0  # The cause of earlier failures may be gone.
                del wanted[name]
                continue
            tenant.is_gone = True
            self._fail_waiters(tenant, tenant.unlisted)
            self._leave(tenant)
            del self.tenants[name]
        self.tenants |= {name: Tenant(entry) for name, entry in wanted.items()}

    def find(self, name: str) -> Tenant | None:
        for word in (name, name.rpartition(":")[0]):
            for tenant in self.tenants.values():
                if word in tenant.entry.names:
                    return tenant
        return None

    # ---- requests ----

    async def acquire(self, tenant: Tenant, loads: bool | None = None) -> None:
        """Wait until the model is loaded, and admit a request. Each `acquire` needs a `release`. Raises
        Refusal."""
        if tenant.admits:
            tenant.n_active += 1
            return
        name = tenant.entry.name
        if self._is_ending:
            raise Refusal(503, "the server is shutting down", retry_s=5)
        if tenant.is_gone:
            raise tenant.unlisted()
        may_load = self.settings.loads if loads is None else loads
        if not (may_load or tenant.is_open or tenant.is_wanted):
            raise Refusal(400, f"{name} is not loaded; POST /models/load loads it", code="model_not_loaded")
        self._refuse_early(tenant)
        waiter = Waiter(self._clock(), asyncio.get_running_loop().create_future())
        tenant.waiters.append(waiter)
        self.schedule()
        try:
            async with asyncio.timeout(self.settings.load_s):
                await waiter.granted
        except BaseException as error:
            self._withdraw(tenant, waiter)
            if isinstance(error, TimeoutError):
                raise self._late(tenant) from None
            raise

    def release(self, tenant: Tenant, *, counts: bool = True) -> None:
        """End a request. `counts` is False for requests that do not delay the model's sleep."""
        tenant.n_active -= 1
        if counts:
            tenant.last_used = self._clock()
        if tenant.is_closing and not tenant.n_active:
            self._end(tenant)
        self.schedule()

    def _refuse_early(self, tenant: Tenant) -> None:
        n_waiting = sum(len(other.waiters) for other in self.tenants.values())
        if n_waiting >= self.settings.queue:
            raise Refusal(429, f"{n_waiting} requests wait for models to load (--queue)", retry_s=5)
        wait_s = tenant.retry_at - self._clock()
        if tenant.failure is not None and wait_s > 0:
            raise tenant.refusal(wait_s)

    def _withdraw(self, tenant: Tenant, waiter: Waiter) -> None:
        """Forget a request that no longer waits. The request may have been admitted in the same moment."""
        if waiter in tenant.waiters:
            tenant.waiters.remove(waiter)
        elif waiter.was_admitted:
            self.release(tenant, counts=False)

    def _late(self, tenant: Tenant) -> Refusal:
        return Refusal(
            503,
            f"{tenant.entry.name} was not loaded within {self.settings.load_s:g} s (--load-timeout); retry "
            "the request",
            code="model_loading",
            retry_s=5,
            extra={"state": tenant.status.value, "progress": round(tenant.progress, 4)},
        )

    # ---- loading and unloading by name ----

    def load(self, tenant: Tenant) -> None:
        """Load a model, without waiting for it. Raises Refusal if it is loaded already."""
        if tenant.is_open and not tenant.is_closing:
            raise Refusal(400, f"{tenant.entry.name} is loaded already", code="model_already_loaded")
        tenant.failure, tenant.wanted_at = None, self._clock()
        self.schedule()

    async def unload(self, tenant: Tenant) -> None:
        """Unload a model, and return when its process has ended. Running requests may continue for the
        model's `stop_s`. Raises Refusal if the model is not loaded."""
        tenant.wanted_at = None
        if tenant.status is Status.LOADING:
            name = tenant.entry.name
            self._fail_waiters(tenant, lambda: Refusal(503, f"{name} was unloaded while it was loading"))
        if tenant.task is None:
            raise Refusal(400, f"{tenant.entry.name} is not loaded", code="model_not_loaded")
        task = tenant.task
        self._leave(tenant)
        if tenant.n_active:
            await asyncio.wait({task}, timeout=tenant.entry.stop_s)
        if tenant.task is task:  # A request may have loaded the model again.
            self._end(tenant)
        await asyncio.wait({task})

    # ---- decisions ----

    def schedule(self) -> None:
        """Start the plans, loads and unloads that the waiting requests need."""
        if self._is_ending:
            return
        line = [tenant for tenant in self.tenants.values() if tenant.is_wanted and tenant.task is None]
        reserved: set[str] = set()  # Devices for which an older request waits.
        n_ahead = 0
        for tenant in sorted(line, key=lambda tenant: tenant.since):
            if tenant.places is None:
                self._start_plan(tenant)
            elif place := (room := self._room()).free_place(tenant, reserved, n_ahead):
                self._start(tenant, place)
            else:
                for victim in room.victims(tenant):
                    self.n_evictions += 1
                    log.info("%s makes room for %s", victim.entry.name, tenant.entry.name)
                    self._leave(victim)
                reserved |= {key for place in tenant.places for key in place.keys}
                n_ahead += 1

    def _room(self) -> Room:
        limits = self.settings.most, self.settings.turn_s
        return Room(*limits, self._left, self._open_ones(), self._clock())

    def _open_ones(self) -> list[Tenant]:
        return [tenant for tenant in (*self.tenants.values(), *self._gone) if tenant.task is not None]

    # ---- changes ----

    def _start_plan(self, tenant: Tenant) -> None:
        used = held_by(self._open_ones())
        left = {key: max(0, nbytes - used[key]) for key, nbytes in self._left.items()}

        async def plan() -> None:
            try:
                tenant.places = await in_thread(lambda: self._plan(tenant.entry, left))
            except Exception as error:
                self._failed(tenant, _typed(error))
            finally:
                tenant.is_planned = False
            self.schedule()

        if not tenant.is_planned:
            tenant.is_planned = True
            self._run(plan())

    def _start(self, tenant: Tenant, place: Place) -> None:
        chosen = f", fit: {place.flags}" if place.flags else ""
        if word := place.chosen.get("mmproj_device"):
            chosen += f", projector: {word}"
        log.info("loading %s on %s%s", tenant.entry.name, ", ".join(place.devices), chosen)
        tenant.model = model = Model(
            lambda progress: self._open(tenant.entry, place, progress),
            lambda: self._opened(tenant),
            gives_up=True,
        )
        tenant.begin(place, self._clock())
        tenant.task = self._run(self._live(tenant, model))

    async def _live(self, tenant: Tenant, model: Model) -> None:
        """Run a model until it has ended. Then its memory is free again."""
        failed: VkbackendError | None = None
        try:
            await model.run()
        except Exception as error:
            failed = _typed(error)
        await in_thread(gc.collect)  # Frees the tokenizer and its vocabulary.
        place, was_closing, tenant.task = tenant.place, tenant.is_closing, None
        tenant.end()
        tenant.places = None  # The file may have changed when the model is loaded again.
        self._gone.discard(tenant)
        if not self._open_ones():
            self._left = dict(self._budgets)
        for other in self.tenants.values():
            if other.entry.options.fit and other.task is None:
                other.places = None  # More memory is left.
        if failed is not None and not (was_closing or self._has_shrunk(failed, place)):
            if isinstance(failed, DeviceLost) and not tenant.is_retried:
                tenant.is_retried = True  # The process was killed, perhaps not because of the model.
            else:
                self._failed(tenant, failed)
        self.schedule()

    def _has_shrunk(self, error: VkbackendError, place: Place | None) -> bool:
        """If other programs hold memory that the plan counted as free, lower the budget, so that another
        model makes room."""
        used = held_by(self._open_ones())
        if not isinstance(error, OutOfDeviceMemory) or place is None:
            return False
        full = [key for key in place.keys - {HOST} if used[key]]
        for key in full:
            self._left[key] = min(self._left[key], used[key] + place.held[key] - 1)
        return bool(full)

    def _opened(self, tenant: Tenant) -> None:
        if tenant.status is Status.LOADING:
            self.n_loads += 1
            self.load_s += self._clock() - tenant.began
        tenant.loaded(self._clock())
        for waiter in tenant.waiters:
            if not waiter.granted.done():
                waiter.granted.set_result(None)
                waiter.was_admitted = True
                tenant.n_active += 1
        tenant.waiters.clear()
        self.schedule()

    def _failed(self, tenant: Tenant, error: VkbackendError) -> None:
        log.error("%s cannot be loaded: %s", tenant.entry.name, error)
        tenant.failed(error, self._clock())
        self._fail_waiters(tenant, lambda: tenant.refusal(tenant.retry_at - self._clock()))

    def _fail_waiters(self, tenant: Tenant, refusal: Callable[[], Refusal]) -> None:
        for waiter in tenant.waiters:
            if not waiter.granted.done():
                waiter.granted.set_exception(refusal())
        tenant.waiters.clear()

    def _leave(self, tenant: Tenant) -> None:
        if tenant.task is None:
            return
        tenant.is_closing = True
        if tenant.is_gone:
            self._gone.add(tenant)
        if not tenant.n_active:
            self._end(tenant)

    def _end(self, tenant: Tenant) -> None:
        if tenant.model is not None and tenant.task is not None:
            tenant.is_closing = True
            tenant.model.close(MOVED)

    # ---- life ----

    async def run(self) -> None:
        while not self._is_ending:
            self.schedule()
            self._sleep_idle()
            await asyncio.sleep(TICK_S)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _sleep_idle(self) -> None:
        now = self._clock()
        for tenant in self.tenants.values():
            idle_s = tenant.entry.idle_s
            if tenant.is_idle and 0 <= idle_s <= now - tenant.last_used and tenant.model is not None:
                log.info("%s sleeps after %g s without a request", tenant.entry.name, idle_s)
                tenant.sleeps = True
                self._leave(tenant)

    def close(self) -> None:
        """Close all models, which ends running requests."""
        self._is_ending = True
        for tenant in (*self.tenants.values(), *self._gone):
            self._fail_waiters(tenant, lambda: Refusal(503, "the server is shutting down", retry_s=5))
            if tenant.model is not None:
                tenant.model.close()

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _typed(error: Exception) -> VkbackendError:
    """Convert an untyped error (a bug) to a typed error, and log where it was raised."""
    if isinstance(error, VkbackendError):
        return error
    log.error("%s, a bug in this server", type(error).__name__, exc_info=error)
    return VkbackendError(f"internal error ({type(error).__name__}); see the server's log")
