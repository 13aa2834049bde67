"""The runtime seam: what meta/ and the op tests need of a device, whoever implements it (Vulkan, numpy,
null).

Only handles, bytes and integers cross it. A device runs executables made from recordings; its queue numbers
the segments it runs 1, 2, 3, ... for the life of the device, and the host says up to which number they may
run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from vkbackend import env, forks
from vkbackend.buffer import Buffer, Home, View
from vkbackend.device_info import DeviceInfo
from vkbackend.errors import Timeout, UnsupportedFeature
from vkbackend.limits import Limits
from vkbackend.recording import Recording, derive_barriers

if TYPE_CHECKING:
    from vkbackend.pages import Pages


class Executable(ABC):
    """A recording that a device is ready to replay."""

    recording: Recording
    n_segments: int

    def report(self) -> None:  # noqa: B027 - only devices with timestamps have something to tell
        """At DEBUG=2: the time of every command of the last replay, which must have finished."""

    @abstractmethod
    def close(self) -> None:
        """Release what building it took; nothing of it may be running, unless the device is abandoned."""


class Queue(ABC):
    """Runs segments in order. Every segment of an executable but the first waits until `allow` reaches its
    number."""

    ahead: bool  # segments may be submitted before they are allowed to run
    submitted: int = 0  # number of the last submitted segment

    @abstractmethod
    def submit(self, executable: Any, first: int, count: int) -> None:
        """Submit segments first..first+count of `executable`; they get the next numbers."""

    @abstractmethod
    def completed(self) -> int:
        """Number of the last segment that finished; raises DeviceLost."""

    @abstractmethod
    def allow(self, number: int) -> None:
        """Let segments up to `number` run."""

    @abstractmethod
    def wait(self, number: int, timeout_s: float) -> bool:
        """Block until `completed() >= number`, at most `timeout_s` seconds; False if it did not happen."""


QUEUE_REFUSED = "submit", "completed", "allow", "wait"  # in a forked child


class Device(ABC):
    """One logical device: memory, executables and a queue. It belongs to the process that opened it."""

    # What a forked child may not call, and what does nothing there.
    REFUSED: ClassVar[tuple[str, ...]] = (
        *("buffer", "import_pages", "free_nbytes", "write", "read", "flush", "invalidate"),
        *("compile", "build", "replay", "run"),
    )
    IGNORED: ClassVar[tuple[str, ...]] = ("free", "drop_upload", "close")

    name: str
    limits: Limits
    queue: Queue
    counts: Counter[str]  # live objects by kind
    created: int  # objects ever made: must not move during decode
    nbytes: Counter[Home]  # memory in use by purpose
    abandoned: bool = False  # stopped answering: nothing of it may be released any more
    imports_pages: bool = False  # `import_pages` may work; where False, it never does
    maps_files: bool = False  # it runs on the host, where a model file's pages are memory as good as any
    compiled: Callable[[], None] | None = None  # called behind every shader that was compiled
    has_codebooks: bool = False  # formats with a codebook take memory for it (codebooks.py)
    host: str = ""  # the name of the host that has this device; empty for this host

    def __new__(cls, *_: Any, **__: Any) -> Self:
        device = super().__new__(cls)
        forks.own(device)
        return device

    def disown(self) -> None:
        """See forks.py: the child has no threads of the driver, and its calls could reach the parent's."""

        def refuse(*_: Any, **__: Any) -> None:
            raise forks.refusal(self.name)

        def ignore(*_: Any, **__: Any) -> None:
            pass

        self.abandoned = True
        for names, thing, instead in (
            (self.REFUSED, self, refuse),
            (self.IGNORED, self, ignore),
            (QUEUE_REFUSED, getattr(self, "queue", None), refuse),
        ):
            for name in names if thing else ():
                setattr(thing, name, instead)

    @property
    def physical(self) -> DeviceInfo | None:
        """The physical device behind it; None where there is none (numpy, null)."""
        return None

    @abstractmethod
    def buffer(self, nbytes: int, home: Home, label: str) -> Buffer:
        """New memory of its own; raises OutOfDeviceMemory."""

    @abstractmethod
    def free(self, buffer: Buffer) -> None:
        """Give a buffer's memory back."""

    def free_nbytes(self) -> int | None:
        """Bytes of its memory that this process may still take, or None where nobody can tell."""
        return None

    def import_pages(self, pages: Pages, label: str) -> Buffer:
        """Host pages as a buffer of this device, in their home; raises UnsupportedFeature where it cannot."""
        raise UnsupportedFeature(f"{self.name} cannot import host memory")

    @abstractmethod
    def write(self, view: View, data: np.ndarray) -> None:
        """Copy an array (any strides, same bytes as the view) into `view`, now; nothing may be running on
        it."""

    @abstractmethod
    def read(self, view: View) -> np.ndarray:
        """The bytes of `view` as a fresh uint8 array."""

    def drop_upload(self) -> None:  # noqa: B027 - a no-op where the host writes device memory itself
        """Free what only `write` needs, once loading is over."""

    def compile(self, recording: Recording) -> None:  # noqa: B027 - `build` does it as well
        """Make the programs of a recording; different devices may do so at once, in threads."""

    def compile_ahead(self, recording: Recording) -> None:  # noqa: B027 - as above
        """Begin to make the programs of a recording beside whatever follows. What is asked for meanwhile goes
        first. Errors are raised where a program is asked for."""

    @abstractmethod
    def build(self, recording: Recording) -> Executable:
        """Compile a placed recording whose barriers are derived."""

    def flush(self, buffer: Buffer) -> None:  # noqa: B027 - a no-op unless memory is not coherent
        """Make host writes to a host-visible buffer visible to the device."""

    def invalidate(self, buffer: Buffer) -> None:  # noqa: B027
        """Make device writes to a host-visible buffer visible to the host."""

    def settle(self) -> bool:
        """Let all submitted work run to its end, whatever it waits for; False if it does not get there in
        time."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Release everything; `counts` is empty afterwards."""

    def replay(self, executable: Executable) -> None:
        """Run an executable and wait for its end: for tests, loading and measurements, never for a step.

        Raises Timeout, after which the device is good for nothing but to be closed."""
        try:
            self.queue.submit(executable, 0, executable.n_segments)
            self.queue.allow(self.queue.submitted)
            if not self.queue.wait(self.queue.submitted, env.timeout_s()):
                raise Timeout(
                    f"{self.name}: {executable.recording.name!r} did not finish in {env.timeout_s()} s; "
                    "VKBACKEND_TIMEOUT sets the limit"
                )
        except Timeout:
            self.abandoned |= not self.settle()
            raise

    def run(self, recording: Recording) -> None:
        """Derive barriers, build, replay once and forget."""
        executable = self.build(derive_barriers(recording))
        try:
            self.replay(executable)
        finally:
            executable.close()
