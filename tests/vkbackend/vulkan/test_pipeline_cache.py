"""The pipeline cache file: a driver sees only what this device and driver wrote, whole."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path
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


ID, OTHER, BODY = bytes(range(32)), bytes(range(1, 33)), os.urandom(5000)


@pytest.fixture
def path(caches: Any, tmp_path: Path) -> Path:
    """A cache file written for ID, in a folder that did not exist."""
    path = tmp_path / "new" / "pipelines.bin"
    caches.write_cache(path, ID, BODY)
    return path


def test_what_was_written_is_read(caches: Any, path: Path) -> None:
    assert caches.read_cache(path, ID) == BODY
    caches.write_cache(path, ID, b"")
    assert caches.read_cache(path, ID) == b""


def test_another_device_or_driver_reads_nothing(caches: Any, path: Path) -> None:
    assert caches.read_cache(path, OTHER) == b""


def test_a_missing_file_or_a_folder_is_empty(caches: Any, path: Path) -> None:
    assert caches.read_cache(path.with_suffix(".none"), ID) == b""
    assert caches.read_cache(path.parent, ID) == b""


@pytest.mark.parametrize("keep", [0, 1, 26, 27, 58, 59, 90, 91, 92, 1000, -1])
def test_a_truncated_file_is_ignored(caches: Any, path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])
    assert caches.read_cache(path, ID) == b""


@pytest.mark.parametrize("at", [0, 26, 27, 58, 59, 90, 91, 2000, -1])
def test_one_changed_bit_is_noticed(caches: Any, path: Path, at: int) -> None:
    blob = bytearray(path.read_bytes())
    blob[at] ^= 0x10
    path.write_bytes(blob)
    assert caches.read_cache(path, ID) == b""


def test_appended_bytes_are_noticed(caches: Any, path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")
    assert caches.read_cache(path, ID) == b""


def test_a_place_that_cannot_be_written_is_no_error(caches: Any, path: Path) -> None:
    """A file where the folder should be refuses everybody; a read-only folder would not refuse root."""
    caches.write_cache(path / "pipelines.bin", ID, BODY)
    assert caches.read_cache(path, ID) == BODY


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into read-only folders")
def test_a_read_only_folder_is_no_error(caches: Any, path: Path) -> None:
    path.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        caches.write_cache(path, ID, b"new")
        assert caches.read_cache(path, ID) == BODY
    finally:
        path.parent.chmod(stat.S_IRWXU)


def test_a_write_that_fails_leaves_the_old_file(
    caches: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new bytes go to a file beside it, which takes its place whole or not at all."""

    def full(source: str, target: Path) -> None:
        assert Path(source).parent == Path(target).parent
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    caches.write_cache(path, ID, b"new")
    monkeypatch.undo()
    assert caches.read_cache(path, ID) == BODY
    assert list(path.parent.iterdir()) == [path], "a temporary file was left behind"


@pytest.mark.parametrize("field", ["vendor", "uuid", "driver_uuid", "driver_version"])
def test_the_identity_tells_devices_and_drivers_apart(
    caches: Any, field: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    info = {"vendor": "AMD", "uuid": "1", "driver_uuid": "2", "driver_version": "3"}
    one, two = (SimpleNamespace(info=SimpleNamespace(**i)) for i in (info, info | {field: "x"}))
    assert caches.cache_path(one) == caches.cache_path(one) != caches.cache_path(two)
    assert caches.cache_path(one).parent == tmp_path


def test_a_fifo_is_not_waited_for(caches: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipelines.bin")
    assert caches.read_cache(tmp_path / "pipelines.bin", ID) == b""


def test_a_file_too_large_is_not_read(caches: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "_MAX_NBYTES", path.stat().st_size - 1)
    assert caches.read_cache(path, ID) == b""


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
