"""The interface of a runtime: devices, queues and executables.

Only handles, bytes and integers pass through this interface. A queue numbers the submitted segments from 1,
and the host sets the largest number that may run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from vkbackend import env, forks
from vkbackend.buffer import Buffer, Home, View
from vkbackend.device_info import DeviceInfo
from vkbackend.errors import Timeout, UnsupportedFeature
from vkbackend.limits import Limits
from vkbackend.recording import Copy, Recording, derive_barriers

if TYPE_CHECKING:
    from vkbackend.pages import Pages


# How a segment and the host signal each other. A semaphore signals to the host that a segment has ended, or
# to a segment that it may begin. Instead, a flag in host memory can signal to the host, and an event to a
# segment.
SIGNALS = ("semaphore", "flag", "event", "flag+event")
FLAG_NBYTES = 4


class Executable(ABC):
    recording: Recording
    n_segments: int

    def report(self) -> None:  # noqa: B027 - only devices with timestamps report
        """If DEBUG=2, print the time of every command of the last replay, which must have finished."""

    @abstractmethod
    def close(self) -> None:
        """Release the executable, which must not be running unless the device is abandoned."""


class Queue(ABC):
    """Runs segments in order. Each segment, except an executable's first, waits until `allow` is called with
    its number or a larger number."""

    ahead: bool  # Whether segments may be submitted before they are allowed to run.
    submitted: int = 0  # Number of the last submitted segment.
    joined: int = 0  # Number of the last segment whose end the host has seen in a step.
    signals: tuple[str, ...] = SIGNALS[:1]  # The SIGNALS that the queue supports.
    signal: str = SIGNALS[0]  # The signal of executables that are built from now on.

    @abstractmethod
    def submit(self, executable: Any, first: int, count: int) -> None:
        """Submit `count` segments of `executable`, from segment `first` on, with the next numbers."""

    def submit_whole(self, executable: Any) -> None:
        """Submit all segments of `executable`, which waits for no event, in one call of the driver if the
        queue calls a driver. The queue must have `ahead`."""
        self.submit(executable, 0, executable.n_segments)

    @abstractmethod
    def completed(self) -> int:
        """Return the number of the last finished segment. Raises DeviceLost."""

    def arrived(self, number: int) -> bool:
        """Return whether the host may read what segment `number` wrote. If the queue uses a flag, the driver
        is not called. The segment's command buffers may still be in use. Raises DeviceLost."""
        return self.completed() >= number

    @abstractmethod
    def allow(self, number: int) -> None:
        """Allow the segments up to `number` to run."""

    @abstractmethod
    def wait(self, number: int, timeout_s: float) -> bool:
        """Wait for segment `number`. Returns False after `timeout_s` seconds."""


class RecordedCopies(ABC):
    """Copies that are recorded once and run between segments."""

    @abstractmethod
    def begin(self) -> None:
        """Start the copies. They need to wait only for segment `Queue.joined`, the last one whose end the
        host has seen."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for started copies. Raises DeviceLost, Timeout."""

    @abstractmethod
    def follow(self) -> None:
        """Run the copies before the segments that the host allows next. If copies share the queue (not
        `Device.copies_apart`), these segments must not have been submitted yet."""

    @abstractmethod
    def close(self) -> None:
        """No copy may be running unless the device is abandoned."""


QUEUE_REFUSED = (
    "submit",
    "submit_whole",
    "completed",
    "arrived",
    "allow",
    "wait",
)  # These methods raise an error in a forked child.


class Device(ABC):
    """A logical device, which only the process that opened it may use."""

    # In a forked child, these methods raise an error (REFUSED) or do nothing (IGNORED).
    REFUSED: ClassVar[tuple[str, ...]] = (
        *("buffer", "import_pages", "free_nbytes", "write", "read", "write_many", "read_many"),
        *("flush", "invalidate"),
        *("compile", "build", "replay", "run", "begin_copies", "copies_ended"),
    )
    IGNORED: ClassVar[tuple[str, ...]] = ("free", "drop_upload", "close")

    name: str
    limits: Limits
    queue: Queue
    counts: Counter[str]  # Number of live objects of each kind.
    created: int  # All objects created so far; decode steps create none.
    nbytes: Counter[Home]  # Bytes in use for each purpose.
    abandoned: bool = False  # Whether the device does not respond, so its objects must not be released.
    imports_pages: bool = False
    maps_files: bool = False  # Whether the device can import pages of a model file.
    records_copies: bool = False  # Whether `recorded_copies` is supported.
    copies_apart: bool = False  # Whether recorded copies have a queue of their own.
    has_visible: bool = False  # Whether the device has memory for Home.VISIBLE.
    host_kinds: tuple[str, ...] = ()  # The kinds of memory for Home.HOST (buffer.py), the default first.
    host_kind: str = ""  # The kind for the next buffers of Home.HOST, or "" for the default.
    compiled: Callable[[], None] | None = None  # Called after each shader compilation.
    compiles: bool = False  # whether `compile_ahead` compiles anything
    has_codebooks: bool = False
    node: str = ""  # The name of the device's machine, or "" for this machine.

    def __new__(cls, *_: Any, **__: Any) -> Self:
        device = super().__new__(cls)
        forks.own(device)
        return device

    def disown(self) -> None:
        """The child has no driver threads, and its calls could disturb the parent's device."""

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
        """Return the physical device, or None for numpy and null devices."""
        return None

    @abstractmethod
    def buffer(self, nbytes: int, home: Home, label: str) -> Buffer:
        """Allocate a buffer. Raises OutOfDeviceMemory."""

    @abstractmethod
    def free(self, buffer: Buffer) -> None:
        """Free the memory of a buffer."""

    def free_nbytes(self) -> int | None:
        """Return the number of bytes of device memory that this process can allocate, or None if unknown."""
        return None

    def import_pages(self, pages: Pages, label: str) -> Buffer:
        """Import host pages as a buffer. Raises UnsupportedFeature."""
        raise UnsupportedFeature(f"{self.name} cannot import host memory")

    @abstractmethod
    def write(self, view: View, data: np.ndarray) -> None:
        """Copy an array of any strides into `view` and wait. The device must be idle."""

    @abstractmethod
    def read(self, view: View) -> np.ndarray:
        """Return a copy of the bytes of `view` as a uint8 array."""

    def read_many(self, views: Sequence[View]) -> list[np.ndarray]:
        """Read several views, on a GPU in one submission."""
        return [self.read(view) for view in views]

    def write_many(self, parts: Sequence[tuple[View, np.ndarray]]) -> None:
        """Write several arrays, on a GPU in one submission."""
        for view, data in parts:
            self.write(view, data)

    def drop_upload(self) -> None:  # noqa: B027 - a no-op if the host writes device memory itself
        """Free the staging buffer of `write` after loading."""

    def compile(self, recording: Recording) -> None:  # noqa: B027 - `build` compiles as well
        """Compile a recording's pipelines. Several devices may compile concurrently."""

    def compile_ahead(self, recording: Recording) -> None:  # noqa: B027 - as above
        """Start to compile pipelines in the background. Pipelines that `compile` or `build` requests
        meanwhile are compiled first. A compile error is raised when the pipeline is requested."""

    def has_compiled(self, recording: Recording) -> bool:
        """Return whether the recording's pipelines, which were passed to `compile_ahead`, are ready."""
        return True

    def stop_compiling(self) -> None:  # noqa: B027 - as above
        """Drop the pipelines of `compile_ahead` whose compilation has not begun."""

    @abstractmethod
    def build(self, recording: Recording, *, events: bool = False) -> Executable:
        """Build an executable from a recording that has addresses and barriers. If `events` is set and the
        queue's signal is an event, segments wait for events in their command buffers. They then begin before
        the host allows them to go on, and may read what the host writes meanwhile, but nothing that another
        device writes."""

    def begin_copies(self, copies: Sequence[Copy]) -> None:
        """Start copies that may run during the next steps. The previous copies must have ended, and no
        submitted step may use the targets. By default, wait for the copies."""
        recording = Recording("copies")
        for copy in copies:
            recording.copy(copy.src, copy.dst, copy.label)
        self.run(recording)

    def copies_ended(self) -> bool:
        """Without waiting, return whether the copies have ended. If so, later steps may use the targets."""
        return True

    def recorded_copies(self, copies: Sequence[Copy]) -> RecordedCopies:
        """Record copies between this device's buffers. Raises UnsupportedFeature."""
        raise UnsupportedFeature(f"{self.name} does not record copies")

    def flush(self, buffer: Buffer) -> None:  # noqa: B027 - a no-op unless memory is not coherent
        """Make the host's writes to a host-visible buffer visible to the device."""

    def invalidate(self, buffer: Buffer) -> None:  # noqa: B027
        """Make the device's writes to a host-visible buffer visible to the host."""

    def settle(self) -> bool:
        """Allow all submitted segments to run and wait for them. Returns False on timeout."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Release all objects of the device. `counts` is then empty."""

    def replay(self, executable: Executable) -> None:
        """Run an executable and wait for it. After a Timeout, `close` is the only valid call."""
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
