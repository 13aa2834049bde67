"""A `Buffer` is device memory. A `Virtual` is scratch memory that `plan_scratch` has not placed yet. A `View`
is a typed, contiguous, row-major range of a `Buffer` or `Virtual`."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any

from vkbackend.formats import row_nbytes

ALIGN = 256  # Vulkan's upper limit for the offset alignment of storage and uniform buffers


def aligned(nbytes: int, align: int = ALIGN) -> int:
    return -(-nbytes // align) * align


# Kinds of pinned host memory for Home.HOST: memory that the driver allocates, with cached reads or combined
# writes, or pages of this process that the driver imports.
CACHED_KIND, COMBINED_KIND, IMPORTED_KIND = "cached", "write-combined", "imported"


class Home(Enum):
    """The purpose of a buffer, which determines its memory type."""

    WEIGHTS = "weights"  # Device local. Written once.
    KV = "kv"  # Device local. Freed with the model.
    SCRATCH = "scratch"  # Device local. Reused within a step.
    HOST = "host"  # Pinned host memory for weights and caches that the device reads over the bus.
    STREAM = "stream"  # Like HOST, but for weights that the host writes while a step runs (meta/streams.py).
    STAGING = "staging"  # Host-visible memory that the host reads and writes, HOST_CACHED if available.
    PAGES = "pages"  # Pinned host pages that the device imports.
    SLOTS = "slots"  # Device local. The slots of all-reduces whose shares are moved by copies.
    VISIBLE = "visible"  # Device local and mapped, for data that the host writes and the device reads.
    MAPPED = "mapped"  # Pages of a model file that a CPU device imports read-only.


_ids = itertools.count(1)


@dataclass(eq=False, slots=True)
class Buffer:
    """Only the runtime interprets `handle`."""

    nbytes: int
    home: Home
    label: str
    handle: Any = None
    host: Any = None  # Writable uint8 array over mapped memory, or None.
    # VkDeviceAddress, or 0 if shaders use bindings.
    address: int = 0
    uid: int = field(default_factory=lambda: next(_ids))

    def __repr__(self) -> str:
        return f"<{self.home.value} {self.label} {self.nbytes} B>"


@dataclass(eq=False, slots=True)
class Virtual:
    nbytes: int
    label: str
    uid: int = field(default_factory=lambda: next(_ids))

    def __repr__(self) -> str:
        return f"<virtual {self.label} {self.nbytes} B>"


def nowhere(home: Home = Home.SCRATCH, label: str = "nowhere") -> Buffer:
    """Return a buffer without memory, for graphs that never run."""
    return Buffer(1 << 62, home, label)


@lru_cache(4096)
def nbytes_of(shape: tuple[int, ...], dtype: str) -> int:
    """Return the number of bytes of an array, rounded up to a multiple of 4, because shaders read 32-bit
    words."""
    *rows, width = shape
    return -(-math.prod(rows) * row_nbytes(dtype, width) // 4) * 4


# Assignments in a frozen class take three times as long, and recording a model makes millions of views.
@dataclass(slots=True, unsafe_hash=True)
class View:
    """An array in `buffer` at byte `offset`, which is a multiple of 4. A view is never changed."""

    buffer: Buffer | Virtual
    offset: int
    shape: tuple[int, ...]
    dtype: str = "f32"
    # Recording a large model reads `nbytes` millions of times, so a property would be slow.
    nbytes: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.nbytes = nbytes_of(self.shape, self.dtype)
        assert self.offset % 4 == 0, f"view offset {self.offset} is not a multiple of 4"
        assert self.offset + self.nbytes <= self.buffer.nbytes, f"{self!r} exceeds {self.buffer!r}"

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def rows(self, begin: int, end: int) -> View:
        """Return rows `begin`..`end`. If `begin` > 0, the bytes of a row must be a multiple of 4."""
        stride = math.prod(self.shape[1:-1]) * row_nbytes(self.dtype, self.shape[-1])
        return View(self.buffer, self.offset + begin * stride, (end - begin, *self.shape[1:]), self.dtype)

    def reshape(self, *shape: int) -> View:
        assert math.prod(shape) == math.prod(self.shape), f"cannot view {self.shape} as {shape}"
        return View(self.buffer, self.offset, shape, self.dtype)
