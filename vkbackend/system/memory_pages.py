"""Allocates memory that devices import, and maps pages before their first use."""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref

import numpy as np

if sys.platform == "win32":
    _COMMIT_RESERVE, _RELEASE, _READ_WRITE = 0x3000, 0x8000, 0x04
    _kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    _kernel.VirtualAlloc.restype = ctypes.c_void_p
    _kernel.VirtualAlloc.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_uint32
    _kernel.VirtualFree.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32

    def private_pages(nbytes: int) -> np.ndarray:
        """Return zeros, u8 [nbytes], in pages that hold nothing else. Raises OSError and OverflowError.

        `mmap` would make a view of a section, which drivers may refuse to import.
        """
        if nbytes >= 1 << 63:
            raise OverflowError(f"{nbytes} bytes do not fit an address")
        start = _kernel.VirtualAlloc(None, nbytes, _COMMIT_RESERVE, _READ_WRITE)
        if not start:
            raise ctypes.WinError(ctypes.get_last_error())
        block = (ctypes.c_uint8 * nbytes).from_address(start)
        # Every view of the array keeps `block`, so the memory is freed after the last view.
        weakref.finalize(block, _kernel.VirtualFree, start, 0, _RELEASE).atexit = False
        return np.ctypeslib.as_array(block)

    def populate(array: np.ndarray, write: bool) -> bool:
        return False

else:
    _WIPE_ON_FORK = 18  # MADV_WIPEONFORK of Linux 4.14, which Python's mmap module lacks
    _POPULATE_READ, _POPULATE_WRITE = 22, 23  # Linux 5.14; older kernels return an error

    def private_pages(nbytes: int) -> np.ndarray:
        """Return zeros, u8 [nbytes], in pages that hold nothing else. Raises OSError and OverflowError.

        A shared mapping would be file backed, which the amdgpu driver refuses. A forked child reads zeros.
        With copy-on-write, a write by the parent could create new pages that the device does not use. With
        unmapped pages, a read by the child would crash.
        """
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if sys.platform == "linux":
            try:
                mapped.madvise(_WIPE_ON_FORK)
            except OSError:  # older kernel
                mapped.madvise(mmap.MADV_DONTFORK)
        return np.frombuffer(mapped, np.uint8)

    if sys.platform == "linux":
        _madvise = ctypes.CDLL(None).madvise
        _madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        _madvise.restype = ctypes.c_int

        def populate(array: np.ndarray, write: bool) -> bool:
            """Map an array's pages at once. Return False on an error, and for arrays that are not
            contiguous."""
            if not array.flags.c_contiguous:
                return False
            begin = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
            how = _POPULATE_WRITE if write else _POPULATE_READ
            return bool(_madvise(begin, array.ctypes.data + array.nbytes - begin, how) == 0)

    else:

        def populate(array: np.ndarray, write: bool) -> bool:
            return False
