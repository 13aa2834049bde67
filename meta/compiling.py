"""Compile for several devices in parallel, because a device mostly waits for its compiler."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

from vkbackend import forks
from vkbackend.ops import MAX_SLOTS
from vkbackend.recording import Recording
from vkbackend.runtime import Device


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_SLOTS, "vkbackend-build")


forks.forget(_threads.cache_clear)


def compile_all(devices: Sequence[Device], recordings: Sequence[Recording]) -> None:
    """Compile each recording whose device is on this node. Raises the first error after all compilations have
    ended."""
    if len(devices) < 2:
        return
    pairs = zip(devices, recordings, strict=True)
    compiling = [_threads().submit(d.compile, recording) for d, recording in pairs if not d.node]
    wait(compiling)  # Wait even after an error, because a compiling device must not be closed.
    for compiled in compiling:
        compiled.result()


def begin_all(devices: Sequence[Device], recordings: Sequence[Recording]) -> None:
    for device, recording in zip(devices, recordings, strict=True):
        if not device.node:
            device.compile_ahead(recording)
