"""Copies arrays into new memory during loading, and maps a file's pages before they are read.

Page faults can take three times as long as the copy (lavapipe, new shared pages of 4 KiB). On Linux,
madvise(2) with MADV_POPULATE_* therefore populates a range at once.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np

from vkbackend import forks
from vkbackend.system.memory_pages import populate

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
        populate(target, write=True)
        populate(data, write=False)
    np.copyto(target, data)


def touch(data: np.ndarray) -> None:
    """Map the pages of a uint8 array, so that later reads cause no page faults."""
    if not populate(data, write=False):
        data[:: mmap.PAGESIZE].max(initial=0)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(N_THREADS, "vkbackend-copy")


forks.forget(_threads.cache_clear)
