"""Together, the slices of a weight form the complete weight. Each piece of a slice fits in one binding."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import examples

from vkbackend import shaderlib
from vkbackend.buffer import ALIGN, Home
from vkbackend.errors import PlanError
from vkbackend.formats import block_of, dequantize
from vkbackend.limits import Limits
from vkbackend.meta.load import load_weights
from vkbackend.meta.plan import Dim, normalise, share_out
from vkbackend.meta.slices import Load, piece_nbytes, piece_shapes, slice_of, slices_of
from vkbackend.meta.split import (
    MIRRORED,
    split,
)
from vkbackend.tools.op_cases.setup import weights as weights_of
from vkbackend.twins.device import NumpyDevice, array_of


class Bytes:
    def __init__(self, **tensors: np.ndarray) -> None:
        self._tensors = tensors

    def data(self, name: str) -> np.ndarray:
        return self._tensors[name]


@st.composite
def loads(draw: st.DrawFn) -> tuple[Load, int, int]:
    """Draw a load, a number of devices, and the largest binding in bytes. Formats, axes, shares and
    alignments vary."""
    dtype = draw(st.sampled_from(shaderlib.weight_types()))
    block = block_of(dtype)[0]
    n_devices = draw(st.integers(1, 5))
    shares = draw(
        st.lists(st.sampled_from([0, 1, 2, 3, 7.5]), min_size=n_devices, max_size=n_devices).filter(any)
    )
    n_out, n_in = draw(st.integers(1, 40)), block * draw(st.integers(1, 5 if block > 1 else 70))
    shape = (n_in,) if draw(st.integers(0, 5)) == 0 else (n_out, n_in)
    axis = draw(st.sampled_from(range(-1, len(shape))))
    state = MIRRORED
    if axis >= 0:
        grain = block if axis == len(shape) - 1 else 1
        segments = draw(st.lists(st.integers(1, 3), max_size=4))
        if segments:
            units = draw(st.integers(1, 5))
            shape = (*shape[:axis], units * sum(segments) * grain, *shape[axis + 1 :])
            ranges = share_out(Dim(units), normalise(shares, n_devices), draw(st.integers(0, 4)))
            state = split(axis, ranges, [n * grain for n in segments])
        else:
            ranges = share_out(Dim(shape[axis], grain), normalise(shares, n_devices), draw(st.integers(0, 4)))
            state = split(axis, ranges)
    row = shape[-1] // block * block_of(dtype)[1]
    return (
        Load("w", shape, dtype, state),
        n_devices,
        ALIGN + row * draw(st.integers(1, 45)) + draw(st.integers(0, 9)),
    )


def stored(load: Load, seed: int = 3) -> np.ndarray:
    raw = weights_of(np.random.default_rng(seed), load.dtype, *load.shape).raw
    assert raw is not None
    return raw.reshape(-1).view(np.uint8)


def indices(load: Load, device: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.r_[rows], np.r_[columns]) for rows, columns in slices_of(load, device)]


@settings(max_examples=examples(100), deadline=None)
@given(loads())
def test_slices_rejoin_to_the_whole(case: tuple[Load, int, int]) -> None:
    load, n_devices, max_range = case
    raw = stored(load)
    want = dequantize(raw, load.dtype, load.shape).reshape(-1, load.shape[-1])
    devices = [NumpyDevice(f"numpy.{d}", Limits(max_storage_range=max_range)) for d in range(n_devices)]
    progress: list[tuple[int, int]] = []
    weights, pages = load_weights(devices, [load], Bytes(w=raw), lambda *done: progress.append(done))
    assert not pages
    got = np.full((n_devices, *want.shape), np.nan, np.float32)
    for d, device in enumerate(devices):
        rows, columns = (np.unique(np.concatenate(held)) for held in zip(*indices(load, d), strict=True))
        assert [first for first, _ in weights["w"].pieces[d]] == [
            first for first, _ in piece_shapes(load, d, piece_nbytes(device))
        ]
        for first, view in weights["w"].pieces[d]:
            assert view.offset % ALIGN == 0 and view.nbytes <= max_range
            local = array_of(view).reshape(-1, view.shape[-1])
            got[d, rows[first : first + len(local), None], columns] = local
    if load.state == MIRRORED:
        assert all(np.array_equal(copy, want) for copy in got)
    else:
        assert np.array_equal((~np.isnan(got)).sum(0), np.ones(want.shape))
        assert np.array_equal(np.nansum(got, 0), want)
    if progress:  # the progress excludes the padding of views
        assert [done for done, _ in progress] == sorted(done for done, _ in progress)
        assert 0 <= progress[-1][1] - progress[-1][0] < 4 * sum(map(len, weights["w"].pieces))


@settings(max_examples=examples(50), deadline=None)
@given(loads().filter(lambda case: len(case[0].shape) == 2))
def test_host_tables_are_whole_on_every_device(case: tuple[Load, int, int]) -> None:
    load, n_devices, max_range = case
    row = math.prod(load.shape[1:]) // block_of(load.dtype)[0] * block_of(load.dtype)[1]
    limits = Limits(max_storage_range=max_range + 4 * row)
    devices = [NumpyDevice(f"numpy.{d}", limits) for d in range(n_devices)]
    raw = stored(load)
    weights, pages = load_weights(devices, [replace(load, state=MIRRORED, home=Home.HOST)], Bytes(w=raw))
    assert len(pages) == 1 and pages[0].bytes[: raw.size].tobytes() == raw.tobytes()
    for pieces in weights["w"].pieces:
        # A binding begins at an aligned offset, which is up to 252 bytes before its piece.
        assert all(view.nbytes + view.offset % ALIGN <= limits.max_storage_range for _, view in pieces)
        assert [first for first, _ in pieces] == list(np.cumsum([0, *(v.shape[0] for _, v in pieces)])[:-1])
        got = np.concatenate([array_of(view) for _, view in pieces])
        assert np.array_equal(got, dequantize(raw, load.dtype, load.shape))


def test_a_cut_through_a_block_is_refused() -> None:
    load = Load("blk.0.w", (4, 64), "q8_0", split(1, ((0, 16), (16, 64))))
    with pytest.raises(PlanError, match=r"blk\.0\.w: columns 0:16 cut q8_0 blocks of 32"):
        slice_of(load, 0)


def test_a_row_beyond_one_binding_is_refused() -> None:
    with pytest.raises(PlanError, match=r"w: a row of 64 f32 exceeds one binding of 255 bytes"):
        piece_shapes(Load("w", (4, 64), "f32", MIRRORED), 0, 255)
