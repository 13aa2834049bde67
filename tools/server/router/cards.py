"""Describes the machine's devices. A separate process opens and measures the devices, so the server's process
needs no Vulkan."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from vkbackend.errors import DeviceLost, Timeout
from vkbackend.meta.elsewhere import Card, HeapCard, PhysicalCard
from vkbackend.meta.speed import measure_speed
from vkbackend.models.arguments import HOST
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.placement.fit import budgets_of
from vkbackend.models.placement.host_limits import host_free_nbytes
from vkbackend.runtime import Device

LOOK_S = 180.0  # Includes a driver's first start, and one second for each device to measure.


@dataclass(frozen=True, slots=True)
class FoundCard:
    """A device that the user named `word`. Words for the same device have the same `key`. `budget` is the
    memory that models may use, in bytes, or None if unknown. If `maps_files`, weights are read from the
    mapped file."""

    word: str
    key: str
    card: Card
    budget: int | None
    maps_files: bool


@dataclass(frozen=True, slots=True)
class Machine:
    """`cards` maps words to devices. `names` are the devices among which models are placed. `host_nbytes` is
    the free host memory, or None if unknown."""

    cards: dict[str, FoundCard]
    names: tuple[str, ...]
    host_nbytes: int | None


def look(names: Sequence[str], others: Sequence[str], runtime: str | None = None) -> Machine:
    """Describe the devices `names` and `others`. If `names` is empty, describe all GPUs, or without GPUs the
    best device. Raises the errors of opening a device."""
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(1, mp_context=context)
    try:
        return executor.submit(describe, tuple(names), tuple(others), runtime).result(timeout=LOOK_S)
    except TimeoutError:
        raise Timeout(f"the devices did not answer for {LOOK_S:.0f} s; try `vkbackend devices`") from None
    except BrokenProcessPool:
        raise DeviceLost(
            "a driver ended the process that opened the devices; try `vkbackend devices`"
        ) from None
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def describe(names: Sequence[str], others: Sequence[str], runtime: str | None = None) -> Machine:
    """Open and measure the devices one by one."""
    names = tuple(names) or _usual()
    cards = {word: _found(word, runtime) for word in dict.fromkeys((*names, *others))}
    first: dict[str, str] = {}  # device key -> the first word for this device
    for word in names:
        first.setdefault(cards[word].key, word)
    return Machine(cards, tuple(first.values()), host_free_nbytes())


def _usual() -> tuple[str, ...]:
    from vkbackend.tools.flags.present import present

    infos = present()
    gpus = [info.uuid for info in infos if not info.is_cpu]
    return tuple(gpus) or (infos[0].uuid,)


def _found(word: str, runtime: str | None) -> FoundCard:
    (device,) = open_devices([word], runtime)
    try:
        budgets = budgets_of([device])
        key = device.physical.uuid if device.physical else HOST
        budget = budgets[0].nbytes if budgets else None
        return FoundCard(word, key, card_of(device), budget, device.maps_files)
    finally:
        device.close()


def card_of(device: Device) -> Card:
    info, physical = device.physical, None
    if info:
        heaps = tuple(HeapCard(heap.nbytes, heap.device_local, heap.budget) for heap in info.heaps)
        physical = PhysicalCard(
            info.name, info.uuid, info.vendor, info.driver, info.driver_version, info.is_cpu, heaps
        )
    speed = measure_speed(device)
    rates = speed.weights, speed.host
    shares_pages, has_codebooks = device.imports_pages, device.has_codebooks
    return Card(
        device.name, device.limits, shares_pages, has_codebooks, device.free_nbytes(), physical, rates
    )
