"""Copies arrays into new memory during loading, and maps a file's pages before they are read.

Page faults can take three times as long as the copy (lavapipe, new shared pages of 4 KiB). madvise(2) with
MADV_POPULATE_* therefore populates a range at once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np

from vkbackend import forks

# Linux 5.14. Older kernels return an error, and copies are slower.
POPULATE_READ, POPULATE_WRITE = 22, 23
PART_NBYTES = 512 << 10  # Each thread copies at least this much, which takes about 0.3 ms.
N_THREADS = min(4, os.cpu_count() or 1)


def copy_into(target: np.ndarray, data: np.ndarray) -> None:
    n = min(N_THREADS, data.nbytes // PART_NBYTES, data.shape[0] if data.ndim else 1)
    if n < 2:
        _copy(target, data)
        return
    ends = [len(data) * i // n for i in range(n + 1)]
    cut = [slice(begin, end) for begin, end in pairwise(ends)]
    for _ in _threads().map(lambda part: _copy(target[part], data[part]), cut):
        pass


def _copy(target: np.ndarray, data: np.ndarray) -> None:
    if target.nbytes >= PART_NBYTES // 2:
        _populate(target, POPULATE_WRITE)
        _populate(data, POPULATE_READ)
    np.copyto(target, data)


def touch(data: np.ndarray) -> None:
    """Map the pages of a uint8 array, so that later reads cause no page faults."""
    if not _populate(data, POPULATE_READ):
        data[:: mmap.PAGESIZE].max(initial=0)


def _populate(array: np.ndarray, how: int) -> bool:
    """Populate an array's pages. Returns False on an error, and for arrays that are not contiguous."""
    if _madvise is None or not array.flags.c_contiguous:
        return False
    begin = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    return _madvise(begin, array.ctypes.data + array.nbytes - begin, how) == 0


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(N_THREADS, "vkbackend-copy")


forks.forget(_threads.cache_clear)


def _find_madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes, madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return madvise


_madvise = _find_madvise()
