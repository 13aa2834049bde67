"""Lists the ways to move and add partial sums (providers) and their needs, and chooses a way for each size.

`auto` uses the ways that `vkbackend tune` measured for these devices (known_ways.py). If nothing was
measured, it uses pages if all devices import them, and otherwise the host sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np

from vkbackend import env
from vkbackend.buffer import View, aligned
from vkbackend.errors import OutOfDeviceMemory, UnsupportedFeature
from vkbackend.meta.copied_slots import CopiedSlots
from vkbackend.meta.host_sum import HostSum, VisibleSum
from vkbackend.meta.imported_pages import ImportedPages, page_of
from vkbackend.meta.known_ways import chosen_ways
from vkbackend.meta.passed_slots import HOPS, PassedSlots, pages_of
from vkbackend.meta.reduce import Provider, Reduce, ReduceSlots, slot_size
from vkbackend.runtime import Device

# Scatter a reduce if it has at least these numbers of devices and bytes, because reading n - 1 complete slots
# then takes longer than a second exchange.
SCATTER_DEVICES, SCATTER_NBYTES = 4, 1 << 20


@dataclass(frozen=True, slots=True)
class Way:
    """`needs` names a feature that the way needs and some device lacks, or returns "". `staging` returns each
    device's (bytes, padded bytes) of host-visible memory for slots of the given bytes. `tune` measures the
    way for `n_tuned` devices or more. Devices of several machines can use the ways that are `networked`."""

    name: str
    make: Callable[[Sequence[Device], int], Provider]
    needs: Callable[[Sequence[Device], int], str]
    staging: Callable[[Sequence[Device], int], list[tuple[int, int]]]
    n_tuned: int = 2
    networked: bool = False
    host_writes: bool = False  # as in Provider

    def lacks(self, devices: Sequence[Device], slot_nbytes: int) -> str:
        """Return what the way needs and the devices lack, or ""."""
        if not self.networked and any(device.node for device in devices):
            return "one machine"
        return self.needs(devices, slot_nbytes)


def _no_pages(devices: Sequence[Device], slot_nbytes: int) -> str:
    if not all(device.imports_pages for device in devices):
        return "imported host pages"
    limit = min(device.limits.max_storage_range for device in devices)
    return "" if len(devices) * slot_size(slot_nbytes) <= limit else "a binding of all slots"


def _no_visible(devices: Sequence[Device], slot_nbytes: int) -> str:
    return "" if all(device.has_visible for device in devices) else "visible device memory"


def _pages_nbytes(
    devices: Sequence[Device], slot_nbytes: int, gathers: bool = False
) -> list[tuple[int, int]]:
    """All shared pages are counted for the first device."""
    nbytes = 2 * (len(devices) + gathers) * slot_size(slot_nbytes)
    return [(nbytes, aligned(nbytes, page_of(devices)))] + [(0, 0)] * (len(devices) - 1)


def _no_copies(devices: Sequence[Device], slot_nbytes: int) -> str:
    return _no_pages(devices, slot_nbytes) if all(d.records_copies for d in devices) else "recorded copies"


def _copied_nbytes(devices: Sequence[Device], slot_nbytes: int) -> list[tuple[int, int]]:
    """Each device also has a copy of all slots in its own memory."""
    pages = _pages_nbytes(devices, slot_nbytes)
    n, padded = pages[0]
    return [(of[0] + n, of[1] + aligned(padded)) for of in pages]


def _passed_nbytes(name: str) -> Callable[[Sequence[Device], int], list[tuple[int, int]]]:
    def staging(devices: Sequence[Device], slot_nbytes: int) -> list[tuple[int, int]]:
        n, size = len(devices), slot_size(slot_nbytes)
        pages, own = 2 * n * pages_of(name, n) * size, n * size
        first = (pages + own, aligned(pages, page_of(devices)) + own)
        return [first] + [(own, own)] * (n - 1)

    return staging


def _own_nbytes(devices: Sequence[Device], slot_nbytes: int) -> list[tuple[int, int]]:
    return [(4 * slot_size(slot_nbytes),) * 2] * len(devices)


def _gathers_nbytes(devices: Sequence[Device], slot_nbytes: int) -> list[tuple[int, int]]:
    return _pages_nbytes(devices, slot_nbytes, gathers=True)


def _large_scattered(devices: Sequence[Device], slot_nbytes: int) -> Provider:
    return ImportedPages(devices, slot_nbytes, scatter_from=SCATTER_NBYTES)


PAGES = Way("pages", ImportedPages, _no_pages, _pages_nbytes, networked=True)
HOST_SUM = Way("host-sum", HostSum, lambda devices, n: "", _own_nbytes, networked=True, host_writes=True)
# Scatters only large sums, but all sums use the same slots.
LARGE_SCATTERED = Way("pages", _large_scattered, _no_pages, _gathers_nbytes, networked=True)
WAYS = (
    PAGES,
    Way("scatter", partial(ImportedPages, scatter_from=0), _no_pages, _gathers_nbytes, networked=True),
    Way("pieces", partial(ImportedPages, cut=True), _no_pages, _pages_nbytes),
    HOST_SUM,
    Way("visible", VisibleSum, _no_visible, _own_nbytes, host_writes=True),
    Way("copies", CopiedSlots, _no_copies, _copied_nbytes),
    # On two or three devices, both pass shares on as the other ways do, with more copies.
    *(Way(name, partial(PassedSlots, name), _no_pages, _passed_nbytes(name), n_tuned=4) for name in HOPS),
)
BY_NAME = {way.name: way for way in WAYS}
PROVIDERS = tuple(BY_NAME)
HOST_WRITTEN = tuple(way.name for way in WAYS if way.host_writes)


def can_signal(provider: str, signal: str) -> bool:
    """Return whether steps whose sums all use `provider` can use `signal`, one of SIGNALS: a segment that
    waits for an event may read only what the host writes."""
    return "event" not in signal or provider in HOST_WRITTEN


# ---- the choice ----


def planned_ways(wanted: str, devices: Sequence[Device], slot_nbytes: int) -> list[tuple[int, Way]]:
    """Return (largest bytes, way) in order of size. The last way covers slots of `slot_nbytes`."""
    if wanted != "auto":
        return [(slot_nbytes, BY_NAME[wanted])]
    measured: list[tuple[int, Way]] = []
    for most, name in chosen_ways(devices):
        here, way = min(most, slot_nbytes), BY_NAME.get(name)
        if way and not way.lacks(devices, here) and (not measured or measured[-1][0] < here):
            measured.append((here, way))
    if measured and measured[-1][0] >= slot_nbytes:
        return measured
    if PAGES.lacks(devices, slot_nbytes):
        return [(slot_nbytes, HOST_SUM)]
    # Between nodes, scattering is faster for three devices or more, because a device then sends 4/3 of a slot
    # instead of two slots.
    least = SCATTER_DEVICES - any(device.node for device in devices)
    many = len(devices) >= least and slot_nbytes >= SCATTER_NBYTES
    return [(slot_nbytes, LARGE_SCATTERED if many else PAGES)]


def slots_nbytes(wanted: str, devices: Sequence[Device], slot_nbytes: int) -> list[tuple[int, int]]:
    """Return (bytes, padded bytes) of host-visible memory per device."""
    total = [(0, 0)] * len(devices)
    if len(devices) == 1 or not slot_nbytes:
        return total
    for most, way in planned_ways(wanted, devices, slot_nbytes):
        staging = way.staging(devices, most)
        total = [(a + c, b + d) for (a, b), (c, d) in zip(total, staging, strict=True)]
    return total


def make_provider(devices: Sequence[Device], slot_nbytes: int, wanted: str = "auto") -> Provider:
    """Create the provider `wanted`, one of PROVIDERS. The provider `auto` uses the best way for each size.
    Raises UnsupportedFeature."""
    planned = planned_ways(wanted, devices, slot_nbytes)
    try:
        with ExitStack() as undo:
            providers = []
            for most, way in planned:
                if lacking := way.lacks(devices, most):
                    raise UnsupportedFeature(
                        f"{', '.join(d.name for d in devices)} lack {lacking}, which the provider {way.name} "
                        f"needs; use {HOST_SUM.name}"
                    )
                providers.append((most, way.make(devices, most)))
                undo.callback(providers[-1][1].close)
            undo.pop_all()
    except (UnsupportedFeature, OutOfDeviceMemory) as error:
        if wanted != "auto":
            raise
        env.log(1, f"all-reduce through per-device staging and a host sum: {error}")
        return HostSum(devices, slot_nbytes)
    return providers[0][1] if len(providers) == 1 else BySize(providers)


class BySize(Provider):
    """A provider for each size of sums: (largest bytes, provider) in order of size."""

    def __init__(self, providers: Sequence[tuple[int, Provider]]) -> None:
        self._providers = providers
        self.name = ", ".join(f"{provider.name} up to {most} bytes" for most, provider in providers)
        self.copies = any(provider.copies for _, provider in providers)
        self.host_writes = all(provider.host_writes for _, provider in providers)
        self.pages_nbytes = sum(provider.pages_nbytes for _, provider in providers)

    def of(self, reduce: Reduce) -> Provider:
        return next((p for most, p in self._providers if reduce.nbytes <= most), self._providers[-1][1])

    def slot(self, device: int, reduce: Reduce) -> View:
        return self.of(reduce).slot(device, reduce)

    def readable(self, device: int, reduce: Reduce) -> ReduceSlots:
        return self.of(reduce).readable(device, reduce)

    def scatters(self, reduce: Reduce) -> bool:
        return self.of(reduce).scatters(reduce)

    def pieces(self, reduce: Reduce) -> int:
        return self.of(reduce).pieces(reduce)

    def hops(self, reduce: Reduce) -> int:
        return self.of(reduce).hops(reduce)

    def passed(self, device: int, reduce: Reduce, hop: int) -> list[tuple[View, View]]:
        return self.of(reduce).passed(device, reduce, hop)

    def gathered(self, device: int, reduce: Reduce) -> View:
        return self.of(reduce).gathered(device, reduce)

    def host_bytes(self, device: int, reduce: Reduce) -> np.ndarray:
        return self.of(reduce).host_bytes(device, reduce)

    def exchange(self, reduce: Reduce) -> None:
        self.of(reduce).exchange(reduce)

    def release(self) -> None:
        for _, provider in self._providers:
            provider.release()

    def close(self) -> None:
        for _, provider in self._providers:
            provider.close()
