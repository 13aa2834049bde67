"""Models load through the staging buffer, which GPUs need if their memory cannot be mapped."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from device_sets import device_params

from vkbackend import env, transfers
from vkbackend.buffer import Home, View
from vkbackend.device_info import DeviceInfo
from vkbackend.vulkan.device import VulkanDevice

pytestmark = pytest.mark.native


@pytest.fixture(params=device_params())
def unmapped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[VulkanDevice]:
    monkeypatch.setenv("VKBACKEND_DISABLE", "device_map")
    monkeypatch.setattr(transfers, "UPLOAD_NBYTES", 4096)
    device = VulkanDevice(request.param)
    yield device
    device.close()
    assert not device.counts


@pytest.mark.parametrize(
    ("rows", "columns", "stored"),
    [
        (1, 17, 17),
        (5, 102, 102),
        (7, 1000, 1300),
        (3, 5000, 9000),
        (64, 256, 512),
        (2, 4096, 4096),
        (1, 3, 3),
    ],
)
def test_rows_of_a_wider_matrix(unmapped: VulkanDevice, rows: int, columns: int, stored: int) -> None:
    source = np.random.default_rng(rows).integers(0, 256, (rows, stored), np.uint8)[:, stored - columns :]
    n_words = -(-rows * columns // 4)
    buffer = unmapped.buffer(4 * n_words + 8, Home.WEIGHTS, "target")
    assert buffer.host is None
    around = View(buffer, 0, (n_words + 2,), "u32")
    unmapped.fill(around, 0xA5A5A5A5)
    unmapped.write(View(buffer, 4, (n_words,), "u32"), source)
    got = unmapped.read(around)
    assert np.array_equal(got[4 : 4 + rows * columns], source.reshape(-1))
    assert (got[:4] == 0xA5).all() and (got[4 + 4 * n_words :] == 0xA5).all()
    unmapped.free(buffer)


@pytest.mark.parametrize("info", device_params())
def test_every_feature_off(info: DeviceInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKBACKEND_DISABLE", ",".join(env.FEATURES))
    device = VulkanDevice(info)
    assert device.free_nbytes() is None
    words = np.arange(1000, dtype=np.uint32)
    view = View(device.buffer(words.nbytes, Home.WEIGHTS, "words"), 0, words.shape, "u32")
    device.write(view, words)
    assert (device.read(view).view(np.uint32) == words).all()
    device.close()
    assert not device.counts


def test_many_views_share_a_submission(unmapped: VulkanDevice) -> None:
    buffer = unmapped.buffer(4096, Home.WEIGHTS, "target")
    unmapped.fill(View(buffer, 0, (1024,), "u32"), 0xA5A5A5A5)
    rng, places = np.random.default_rng(5), [(0, 12), (40, 7), (1000, 1), (2048, 600)]
    parts = [
        (View(buffer, at, (-(-n // 4),), "u32"), rng.integers(0, 256, n, dtype=np.uint8)) for at, n in places
    ]
    unmapped.write_many(parts)
    want = np.full(4096, 0xA5, np.uint8)
    for at, (_, data) in zip([at for at, _ in places], parts, strict=True):
        want[at : at + data.size] = data
    assert np.array_equal(unmapped.read(View(buffer, 0, (1024,), "u32")), want)
    views = [view for view, _ in parts]
    for view, got in zip(views, unmapped.read_many(views), strict=True):
        assert np.array_equal(got, want[view.offset : view.end])
    assert unmapped.read_many([]) == []
    unmapped.free(buffer)


@pytest.mark.parametrize("info", device_params())
def test_many_mapped_views(info: DeviceInfo) -> None:
    device = VulkanDevice(info)
    buffers = [device.buffer(4096, home, "mapped") for home in (Home.KV, Home.STAGING)]
    for n, buffer in enumerate(buffers):
        device.fill(View(buffer, 0, (1024,), "u32"), 0x01010101 * (n + 1))
    views = [View(buffer, 8 * n, (5 + n,), "u32") for n, buffer in enumerate(buffers)]
    assert [part.tolist() for part in device.read_many(views)] == [[1] * 20, [2] * 24]
    for buffer in buffers:
        device.free(buffer)
    device.close()
