"""A driver receives cache data only if the same device and driver made it."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest

from vkbackend.errors import UnsupportedFeature

pytestmark = pytest.mark.no_vulkan


@pytest.fixture(scope="module")
def caches() -> Any:
    try:
        from vkbackend.vulkan import pipeline_cache
    except UnsupportedFeature as error:
        pytest.skip(f"no Vulkan loader on this machine: {error}")
    return pipeline_cache


@pytest.mark.parametrize("field", ["vendor", "uuid", "driver_uuid", "driver_version"])
def test_entry_name_differs_by_device_and_driver(caches: Any, field: str) -> None:
    info = {"vendor": "AMD", "uuid": "1", "driver_uuid": "2", "driver_version": "3"}
    before, two = (SimpleNamespace(info=SimpleNamespace(**i)) for i in (info, info | {field: "x"}))
    assert caches.entry_name(before) == caches.entry_name(before) != caches.entry_name(two)


UUID = bytes(range(16))


def header(size: int = 32, version: int = 1, vendor: int = 5, device: int = 6, uuid: bytes = UUID) -> bytes:
    return struct.pack("<4I", size, version, vendor, device) + uuid


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        (header(), True),
        (header() + b"data", True),
        (header(size=36) + b"more data", True),
        (header(size=36), False),
        (header(size=31) + b"data", False),
        (header(size=0xFFFFFFFF) + b"data", False),
        (header(version=2), False),
        (header(vendor=6), False),
        (header(device=5), False),
        (header(uuid=UUID[::-1]), False),
        (header()[:-1], False),
        (b"", False),
    ],
)
def test_the_header_that_vulkan_defines(caches: Any, body: bytes, fits: bool) -> None:
    assert caches.fits(body, 5, 6, UUID) is fits
