from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from vkbackend.errors import OutOfDeviceMemory, UnsupportedFeature, UnsupportedModel, VkbackendError
from vkbackend.tools.server.failures import Refusal
from vkbackend.tools.server.model import Model, State
from vkbackend.tools.server.router.places import Place
from vkbackend.tools.server.router.registry import Entry

LONGEST_WAIT_S = 60.0  # A model that cannot be loaded is tried again after 1, 2, 4 ... seconds.


class Status(Enum):
    """llama-server's status words, and `unloading`."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    SLEEPING = "sleeping"


@dataclass(eq=False, slots=True)
class Waiter:
    """A request that has waited for its model since `since`."""

    since: float
    granted: asyncio.Future[None]
    was_admitted: bool = False


@dataclass(eq=False, slots=True, weakref_slot=True)
class Tenant:
    """A listed model, its process (if any), and its requests. `task` runs while the model holds memory.
    `n_active` counts admitted requests."""

    entry: Entry
    places: list[Place] | None = None
    is_planned: bool = False  # The model's places are being computed.
    task: asyncio.Task[None] | None = None
    model: Model | None = None
    place: Place | None = None
    n_active: int = 0
    waiters: list[Waiter] = field(default_factory=list)
    wanted_at: float | None = None  # When a client asked to load the model, without a request.
    began: float = 0.0
    loaded_at: float = 0.0
    last_used: float = 0.0
    is_ready: bool = False
    is_closing: bool = False
    is_gone: bool = False  # No longer in the list.
    sleeps: bool = False  # The model was unloaded because it was idle.
    is_retried: bool = False  # The model's process was lost while the model loaded.
    failure: VkbackendError | None = None
    n_failures: int = 0
    retry_at: float = 0.0

    @property
    def status(self) -> Status:
        if self.task is None:
            return Status.SLEEPING if self.sleeps else Status.UNLOADED
        if self.is_closing:
            return Status.UNLOADING
        return Status.LOADED if self.is_ready else Status.LOADING

    @property
    def is_open(self) -> bool:
        return self.task is not None

    @property
    def admits(self) -> bool:
        is_usable = self.model is not None and self.model.state is State.READY
        return self.status is Status.LOADED and is_usable

    @property
    def is_idle(self) -> bool:
        return self.status is Status.LOADED and not self.n_active and not self.waiters

    @property
    def is_wanted(self) -> bool:
        return bool(self.waiters) or self.wanted_at is not None

    @property
    def since(self) -> float:
        """Return the time since which the model is wanted."""
        times = [waiter.since for waiter in self.waiters]
        return min([*times, *([] if self.wanted_at is None else [self.wanted_at])])

    @property
    def progress(self) -> float:
        if self.model is None or not self.model.bytes_total:
            return 0.0
        return self.model.bytes_loaded / self.model.bytes_total

    def begin(self, place: Place, now: float) -> None:
        self.place, self.began, self.is_ready, self.sleeps = place, now, False, False
        self.is_closing = False

    def loaded(self, now: float) -> None:
        if not self.is_ready:
            self.loaded_at = self.last_used = now
        self.is_ready, self.wanted_at = True, None
        self.failure, self.n_failures, self.is_retried = None, 0, False

    def end(self) -> None:
        self.place, self.model = None, None
        self.is_ready = self.is_closing = False

    def failed(self, error: VkbackendError, now: float) -> None:
        self.failure, self.wanted_at, self.is_retried = error, None, False
        self.n_failures += 1
        self.retry_at = now + min(2.0 ** (self.n_failures - 1), LONGEST_WAIT_S)

    @property
    def message(self) -> str:
        """Return the reason for the failure, without the server's folders."""
        text, options = str(self.failure or ""), self.entry.options
        for path in filter(None, (options.path, options.draft, options.mmproj)):
            text = text.replace(f"{Path(path).parent}/", "")
        return text

    def unlisted(self) -> Refusal:
        return Refusal(404, f"{self.entry.name} is no longer listed", code="model_not_found")

    def refusal(self, wait_s: float) -> Refusal:
        text = f"{self.entry.name} cannot be loaded: {self.message}"
        never = UnsupportedModel | UnsupportedFeature
        if isinstance(self.failure, never):
            return Refusal(501, text, code="model_load_failed")
        code = "out_of_memory" if isinstance(self.failure, OutOfDeviceMemory) else "model_load_failed"
        return Refusal(503, text, code=code, retry_s=max(1, round(wait_s)))
