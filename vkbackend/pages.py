from __future__ import annotations

import ctypes
import mmap

import numpy as np

from vkbackend.buffer import Home, aligned
from vkbackend.errors import OutOfDeviceMemory
from vkbackend.system.memory_pages import private_pages


class HostPages:
    """Private anonymous memory that devices import. A forked child reads zeros. Address and size are
    multiples of the page size and of `align`, both powers of two."""

    home = Home.PAGES

    def __init__(self, nbytes: int, align: int = 0) -> None:
        align = max(align, mmap.PAGESIZE)
        self.nbytes = aligned(max(nbytes, 1), align)
        try:
            whole = private_pages(self.nbytes + align)
        except (OSError, OverflowError) as error:
            raise OutOfDeviceMemory(
                f"the host has no {self.nbytes} bytes of memory for pages that devices share ({error}); "
                "use a smaller model or context",
                requested=self.nbytes,
            ) from None
        skip = -whole.ctypes.data % align
        self.bytes = whole[skip : skip + self.nbytes]

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)


class FilePages:
    """The pages of a mapped file that contain bytes `begin`..`end`. Byte `begin` is at offset `lead` in the
    first page.

    The file remains mapped while this object exists. If another process truncates the file, reading the pages
    raises SIGBUS.
    """

    home = Home.MAPPED

    def __init__(self, file: np.ndarray, begin: int, end: int) -> None:
        self._file, page = file, mmap.PAGESIZE
        first = int(file.ctypes.data) + begin
        self.lead = first % page
        self.address = first - self.lead
        self.nbytes = aligned(self.lead + end - begin, page)
        # Past the end of the file, the last page has zeros.
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address))
        self.bytes.flags.writeable = False


Pages = HostPages | FilePages
