"""Slices on devices are joined to a tensor, and rows are written back to the slices, for every format, split
and alignment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_sets import some
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import examples
from slices import DTYPES, loads, noise, numpy_devices

from vkbackend.buffer import Buffer, Home, View
from vkbackend.errors import PlanError
from vkbackend.formats import block_of, row_nbytes
from vkbackend.meta.gather import PIECE_NBYTES, extents, gather, gather_rows, scatter_rows, stream
from vkbackend.meta.load import load_weights
from vkbackend.meta.slices import Load
from vkbackend.meta.split import MIRRORED, Ranges, split
from vkbackend.meta.tensor import Weight


class Bytes:
    def __init__(self, raw: np.ndarray) -> None:
        self.raw = raw

    def data(self, name: str) -> np.ndarray:
        return self.raw


@settings(max_examples=examples(150), deadline=None)
@given(loads(), st.sampled_from([1 << 30, 4096]))
def test_split_then_join_is_the_identity(case: tuple[Load, int], max_range: int) -> None:
    load, n = case
    raw = noise(int(np.prod(load.shape[:-1])) * row_nbytes(load.dtype, load.shape[-1]))
    devices = numpy_devices(n, max_storage_range=max_range)
    try:
        weights, _pages = load_weights(devices, [load], Bytes(raw))
    except PlanError:  # one expert exceeds a binding
        assert max_range == 4096
        return
    assert np.array_equal(gather(devices, weights["w"]), raw)


@settings(max_examples=examples(100), deadline=None)
@given(loads(), st.data())
def test_rows_written_are_read_back(case: tuple[Load, int], data: st.DataObject) -> None:
    load, n = case
    row_bytes = row_nbytes(load.dtype, load.shape[-1])
    n_rows = int(np.prod(load.shape[:-1]))
    raw, devices = noise(n_rows * row_bytes).reshape(n_rows, row_bytes), numpy_devices(n)
    weights, _pages = load_weights(devices, [load], Bytes(raw.reshape(-1)))
    begin = data.draw(st.integers(0, n_rows - 1))
    end = data.draw(st.integers(begin + 1, n_rows))
    new = noise((end - begin) * row_bytes, seed=1).reshape(-1, row_bytes)
    assert np.array_equal(gather_rows(devices, weights["w"], begin, end), raw[begin:end])
    scatter_rows(devices, weights["w"], begin, new)
    raw[begin:end] = new
    assert np.array_equal(gather(devices, weights["w"]), raw.reshape(-1))


def cache(devices: list[Any], ranges: Ranges, width: int = 24, n_cells: int = 8) -> Weight:
    weight = Weight("cache", (n_cells, width), "f16", split(1, ranges), [])
    for device, (begin, end) in zip(devices, ranges, strict=True):
        buffer: Buffer = device.buffer(max(4, 2 * n_cells * (end - begin)), Home.KV, "cache")
        pieces = [(0, View(buffer, 0, (n_cells, end - begin), "f16"))] if end > begin else []
        weight.pieces.append(pieces)
    return weight


def test_heads_that_several_devices_hold() -> None:
    devices = numpy_devices(4)
    weight = cache(devices, ((0, 16), (8, 16), (16, 16), (8, 24)))
    rows = noise(8 * 48).reshape(8, 48)
    scatter_rows(devices, weight, 0, rows)
    for d, columns in ((0, slice(0, 32)), (1, slice(16, 32)), (3, slice(16, 48))):
        [extent] = extents(weight, d)
        assert np.array_equal(devices[d].read(extent.view).reshape(8, -1), rows[:, columns])
    assert extents(weight, 2) == []
    # Devices 0, 1 and 3 have columns 16 to 32. gather_rows reads these columns from device 0, so changes on
    # devices 1 and 3 have no effect there.
    for d in (1, 3):
        [extent] = extents(weight, d)
        devices[d].write(extent.view, 255 - devices[d].read(extent.view))
    got = gather_rows(devices, weight, 2, 5)
    assert np.array_equal(got[:, :32], rows[2:5, :32]) and np.array_equal(got[:, 32:], 255 - rows[2:5, 32:])


def test_bytes_that_no_device_holds() -> None:
    devices = numpy_devices(2)
    weight = cache(devices, ((0, 8), (8, 24)))
    weight.pieces[1] = []
    with pytest.raises(PlanError, match=r"no device holds all of rows 3:5 of cache, SPLIT"):
        gather_rows(devices, weight, 3, 5)


def test_a_mirrored_tensor_that_some_devices_lack() -> None:
    devices = numpy_devices(3)
    weight = cache(devices, ((0, 24),) * 3)
    weight.state = MIRRORED
    rows = noise(8 * 48).reshape(8, 48)
    scatter_rows(devices, weight, 0, rows)
    weight.pieces[0] = []
    assert np.array_equal(gather(devices, weight), rows.reshape(-1))


def test_a_large_tensor_comes_in_pieces() -> None:
    width, n_rows = 1 << 18, 40
    raw = noise(4 * width * n_rows)
    devices = numpy_devices(2)
    load = Load("w", (n_rows, width), "f32", split(1, ((0, 1 << 17), (1 << 17, width))))
    weights, _pages = load_weights(devices, [load], Bytes(raw))
    pieces = list(stream(devices, weights["w"]))
    assert [piece.nbytes for piece in pieces] == [PIECE_NBYTES, PIECE_NBYTES, 8 << 20]
    assert np.array_equal(np.concatenate(pieces).reshape(-1), raw)


@pytest.mark.runtimes(wide=True)
@pytest.mark.parametrize("dtype", some(DTYPES, 3))
def test_on_drivers(device: Any, dtype: str) -> None:
    """Rows begin at byte offsets that are not multiples of 4."""
    width = 3 * block_of(dtype)[0]
    load = Load("w", (11, width), dtype, split(0, ((0, 5), (5, 11))))
    raw = noise(11 * row_nbytes(dtype, width)).reshape(11, -1)
    weights, _pages = load_weights([device, device], [load], Bytes(raw.reshape(-1)))
    try:
        new = noise(3 * raw.shape[1], seed=1).reshape(3, -1)
        scatter_rows([device, device], weights["w"], 3, new)
        raw[3:6] = new
        for begin, end in ((0, 11), (3, 6), (5, 6), (1, 10)):
            assert np.array_equal(gather_rows([device, device], weights["w"], begin, end), raw[begin:end])
    finally:
        for buffer in {view.buffer for pieces in weights["w"].pieces for _, view in pieces}:
            device.free(buffer)
        device.drop_upload()
