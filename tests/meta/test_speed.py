from __future__ import annotations

import math
from pathlib import Path

import pytest
from device_sets import device_params, some

from vkbackend import cache_folder
from vkbackend.meta import speed
from vkbackend.meta.speed import Speed
from vkbackend.twins.device import NumpyDevice

CHOOSES_DEVICES = True  # see conftest.py


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    return tmp_path / "speeds.json"


@pytest.mark.parametrize("device", some(device_params(), 9), indirect=True, scope="session")
def test_measured_once_per_device(device: object, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(device.counts), dict(device.nbytes)  # type: ignore[attr-defined]
    measured = speed.measure_speed(device)  # type: ignore[arg-type]
    assert 1e6 < measured.weights < 1e14 and 1e6 < measured.host < 1e14
    reduce_s = speed.measure_reduce([device, device], 5000)  # type: ignore[list-item]
    assert 1e-7 < reduce_s < 1
    assert (dict(device.counts), dict(device.nbytes)) == before  # type: ignore[attr-defined]

    def refuse(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(speed, "_twin", refuse)
    assert speed.measure_speed(device) == measured  # type: ignore[arg-type]
    assert speed.measure_reduce([device, device], 8192) == reduce_s  # type: ignore[list-item]
    assert speed.measure_reduce([device], 8192) == 0  # type: ignore[list-item]
    monkeypatch.setenv("VKBACKEND_FLOOR", "1")
    with pytest.raises(AssertionError, match="measured again"):
        speed.measure_speed(device)  # type: ignore[arg-type]


def check_measured_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_read_rate", lambda device, home: 5.0)
    assert speed.measure_speed(NumpyDevice("a")) == Speed(5.0, 5.0)
    measured = cache_folder.read_json(cache.name)
    assert measured == {"format": 1, "measured": {"speed NumpyDevice": [5.0, 5.0]}}


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        3,
        {"format": 2, "measured": {}},
        {"format": 1, "measured": 3},
        {"format": 1},
        {"format": 1, "measured": {"speed NumpyDevice": [1.0]}},
        {"format": 1, "measured": {"speed NumpyDevice": [0.0, -1.0]}},
        {"format": 1, "measured": {"speed NumpyDevice": [math.nan, 1.0]}},
        {"format": 1, "measured": {"speed NumpyDevice": [10**400, 1.0]}},
    ],
)
def test_unexpected_content_is_measured_again(
    content: object, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_folder.write_json(cache.name, content)
    check_measured_again(cache, monkeypatch)


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, b"\0\xff"], ids=len)
def test_a_damaged_file_is_measured_again(
    content: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_bytes(content)
    check_measured_again(cache, monkeypatch)


def test_cache_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(speed, "_read_rate", lambda device, home: 5.0)
    assert speed.measure_speed(NumpyDevice("a")) == Speed(5.0, 5.0)
