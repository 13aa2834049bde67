"""Host memory that devices import: pinned pages, and those of a mapped file."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from vkbackend.buffer import Home, aligned
from vkbackend.errors import OutOfDeviceMemory

WIPE_ON_FORK = 18  # MADV_WIPEONFORK, of Linux 4.14, which the mmap module lacks


class HostPages:
    """Page-aligned private anonymous memory that devices can import.

    Private, because a shared mapping counts as file backed and amdgpu refuses to import it. A forked child
    gets zeros in their place. With copies of the pages, copy-on-write would give the parent other pages than
    the device has; with none at all, the child would crash when it reads them.
    """

    home = Home.PAGES

    def __init__(self, nbytes: int, align: int = 4096) -> None:
        self.nbytes = aligned(max(nbytes, 1), align)
        try:
            self._map = mmap.mmap(-1, self.nbytes + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise OutOfDeviceMemory(
                f"the host has no {self.nbytes} bytes of memory for pages that devices share ({error}); "
                "use a smaller model or context",
                requested=self.nbytes,
            ) from None
        try:
            self._map.madvise(WIPE_ON_FORK)
        except OSError:  # the kernel does not know it
            self._map.madvise(mmap.MADV_DONTFORK)
        whole = np.frombuffer(self._map, np.uint8)
        skip = -whole.ctypes.data % align
        self.bytes = whole[skip : skip + self.nbytes]

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)


class FilePages:
    """The whole pages of a mapped file that hold its bytes begin..end, for import like HostPages. Byte
    `begin` is `lead` bytes after the first page's start.

    They are read only and stay the file's: if somebody truncates the file, reading them raises SIGBUS. This
    object keeps the file mapped.
    """

    home = Home.MAPPED

    def __init__(self, file: np.ndarray, begin: int, end: int) -> None:
        self._file, page = file, mmap.PAGESIZE
        first = int(file.ctypes.data) + begin
        self.lead = first % page
        self.address = first - self.lead
        self.nbytes = aligned(self.lead + end - begin, page)
        # The last page may go on after the end of the file; its bytes there read as zeros.
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address))
        self.bytes.flags.writeable = False


Pages = HostPages | FilePages
