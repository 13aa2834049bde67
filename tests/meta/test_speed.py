"""The measured speeds of devices: measured once, kept in a file that may be damaged or not writable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vkbackend.meta import speed
from vkbackend.meta.speed import Speed
from vkbackend.twins.device import NumpyDevice


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    return tmp_path / "speeds.json"


def test_measured_once_per_device(device: object, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(device.counts), dict(device.nbytes)  # type: ignore[attr-defined]
    found = speed.measure_speed(device)  # type: ignore[arg-type]
    assert 1e6 < found.weights < 1e14 and 1e6 < found.host < 1e14
    reduce_s = speed.measure_reduce([device, device], 5000)  # type: ignore[list-item]
    assert 1e-7 < reduce_s < 1
    assert (dict(device.counts), dict(device.nbytes)) == before  # type: ignore[attr-defined]

    def refuse(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(speed, "_twin", refuse)
    assert speed.measure_speed(device) == found  # type: ignore[arg-type]
    assert speed.measure_reduce([device, device], 8192) == reduce_s  # type: ignore[list-item]
    assert speed.measure_reduce([device], 8192) == 0  # type: ignore[list-item]
    monkeypatch.setenv("VKBACKEND_FLOOR", "1")
    with pytest.raises(AssertionError, match="measured again"):
        speed.measure_speed(device)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "\0\xff",
        '{"format": 2, "measured": {}}',
        '{"format": 1, "measured": 3}',
        json.dumps({"format": 1, "measured": {"speed NumpyDevice": [1.0]}}),
        json.dumps({"format": 1, "measured": {"speed NumpyDevice": [0.0, -1.0]}}),
        '{"format": 1, "measured": {"speed NumpyDevice": [NaN, 1.0]}}',
    ],
)
def test_damaged_file_is_measured_again(content: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_bytes(content.encode("latin-1"))
    monkeypatch.setattr(speed, "_read_rate", lambda device, home: 5.0)
    assert speed.measure_speed(NumpyDevice("a")) == Speed(5.0, 5.0)
    assert json.loads(cache.read_text())["measured"]["speed NumpyDevice"] == [5.0, 5.0]


def test_cache_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(speed, "_read_rate", lambda device, home: 5.0)
    assert speed.measure_speed(NumpyDevice("a")) == Speed(5.0, 5.0)
