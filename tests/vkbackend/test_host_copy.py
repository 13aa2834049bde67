from __future__ import annotations

import mmap

import numpy as np
import pytest

from vkbackend import host_copy

pytestmark = pytest.mark.no_vulkan


@pytest.mark.parametrize("shape", [(1,), (4097,), (3, 5000), (257, 64), (1, 100_000), (8, 0)])
@pytest.mark.parametrize("step", [1, 2])
def test_copies_write_every_byte_and_no_others(
    shape: tuple[int, ...], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copy, "PART_NBYTES", 4096)
    monkeypatch.setattr(host_copy, "N_THREADS", 3)
    wide = (*shape[:-1], shape[-1] * step)
    data = np.random.default_rng(0).integers(0, 256, wide, np.uint8)[..., ::step]
    n, skip = data.size, 37
    pages = np.frombuffer(mmap.mmap(-1, n + 2 * skip), np.uint8)
    pages[:] = 0xA5
    host_copy.copy_into(pages[skip : skip + n].reshape(shape), data)
    assert (pages[skip : skip + n].reshape(shape) == data).all()
    assert (pages[:skip] == 0xA5).all() and (pages[skip + n :] == 0xA5).all()


def test_errors_of_threads_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "PART_NBYTES", 16)
    with pytest.raises(ValueError, match="broadcast"):
        host_copy.copy_into(np.zeros((64, 3), np.uint8), np.zeros((64, 2), np.uint8))
