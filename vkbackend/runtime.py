"""The runtime interface of a device (Vulkan, numpy, null) for meta/ and the op tests.

Only handles, bytes and integers pass through this interface. A device runs executables built from recordings.
The device's queue numbers all segments 1, 2, 3, ..., and the host sets up to which number they may run.
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
    recording: Recording
    n_segments: int

    def report(self) -> None:  # noqa: B027 - only devices with timestamps report
        """At DEBUG=2 print the time of every command of the last replay, which must have finished."""

    @abstractmethod
    def close(self) -> None:
        """Release the executable, which must not be running unless the device is abandoned."""


class Queue(ABC):
    """Runs segments in order. Except for the first, each segment of an executable waits until `allow` reaches
    its number."""

    ahead: bool  # segments may be submitted before they are allowed
    submitted: int = 0  # number of the last submitted segment

    @abstractmethod
    def submit(self, executable: Any, first: int, count: int) -> None:
        """Submit `count` segments of `executable`, from segment `first` on, under the next numbers."""

    @abstractmethod
    def completed(self) -> int:
        """Return the number of the last segment that finished. Raises DeviceLost."""

    @abstractmethod
    def allow(self, number: int) -> None:
        """Let segments up to `number` run."""

    @abstractmethod
    def wait(self, number: int, timeout_s: float) -> bool:
        """Wait until `completed() >= number`. Returns False after `timeout_s` seconds."""


QUEUE_REFUSED = "submit", "completed", "allow", "wait"  # calls that raise in a forked child


class Device(ABC):
    """A logical device with memory, executables and a queue. It belongs to the process that opened it."""

    # Calls that raise in a forked child, and calls that do nothing there.
    REFUSED: ClassVar[tuple[str, ...]] = (
        *("buffer", "import_pages", "free_nbytes", "write", "read", "flush", "invalidate"),
        *("compile", "build", "replay", "run"),
    )
    IGNORED: ClassVar[tuple[str, ...]] = ("free", "drop_upload", "close")

    name: str
    limits: Limits
    queue: Queue
    counts: Counter[str]  # live objects by kind
    created: int  # objects ever created; constant during decode
    nbytes: Counter[Home]  # memory in use by purpose
    abandoned: bool = False  # the device stopped answering and must not be released
    imports_pages: bool = False  # if False, `import_pages` always fails
    maps_files: bool = False  # runs on the host, so it can read a model file's pages
    compiled: Callable[[], None] | None = None  # called after each shader compilation
    has_codebooks: bool = False  # codebooks take device memory (codebooks.py)
    host: str = ""  # name of the device's host; empty for this host

    def __new__(cls, *_: Any, **__: Any) -> Self:
        device = super().__new__(cls)
        forks.own(device)
        return device

    def disown(self) -> None:
        """Refuse calls in a forked child, which has no driver threads and could disturb the parent's
        device."""

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
        """The physical device; None for numpy and null devices."""
        return None

    @abstractmethod
    def buffer(self, nbytes: int, home: Home, label: str) -> Buffer:
        """Allocate memory; raises OutOfDeviceMemory."""

    @abstractmethod
    def free(self, buffer: Buffer) -> None:
        """Free the memory of a buffer."""

    def free_nbytes(self) -> int | None:
        """Return the bytes of device memory available to this process; None if unknown."""
        return None

    def import_pages(self, pages: Pages, label: str) -> Buffer:
        """Import host pages as a buffer; raises UnsupportedFeature."""
        raise UnsupportedFeature(f"{self.name} cannot import host memory")

    @abstractmethod
    def write(self, view: View, data: np.ndarray) -> None:
        """Copy an array (of any strides and the same size) into `view` synchronously; the device must be
        idle."""

    @abstractmethod
    def read(self, view: View) -> np.ndarray:
        """Return the bytes of `view` as a new uint8 array."""

    def drop_upload(self) -> None:  # noqa: B027 - a no-op if the host writes device memory itself
        """Free the memory that only `write` needs, after loading."""

    def compile(self, recording: Recording) -> None:  # noqa: B027 - `build` compiles as well
        """Compile a recording's programs. Several devices may compile concurrently."""

    def compile_ahead(self, recording: Recording) -> None:  # noqa: B027 - as above
        """Start to compile a recording's programs in the background; later requests are compiled first.
        Errors are raised when a program is requested."""

    @abstractmethod
    def build(self, recording: Recording) -> Executable:
        """Build an executable from a placed recording with barriers."""

    def flush(self, buffer: Buffer) -> None:  # noqa: B027 - a no-op unless memory is not coherent
        """Make host writes to a host-visible buffer visible to the device."""

    def invalidate(self, buffer: Buffer) -> None:  # noqa: B027
        """Make device writes to a host-visible buffer visible to the host."""

    def settle(self) -> bool:
        """Allow all submitted work to run and wait for its end. Returns False on timeout."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Release everything, so that `counts` is empty."""

    def replay(self, executable: Executable) -> None:
        """Run an executable and wait for it, for tests, loading and measurements.

        Raises Timeout; after a timeout the device can only be closed.
        """
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
        executable = self.build(derive_barriers(recording))
        try:
            self.replay(executable)
        finally:
            executable.close()
