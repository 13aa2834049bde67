"""Draws random weights of any format, and splits them over numpy devices in any way."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from vkbackend import shaderlib
from vkbackend.buffer import Home
from vkbackend.formats import block_of
from vkbackend.limits import Limits
from vkbackend.meta.slices import Load
from vkbackend.meta.split import MIRRORED, Ranges, split, split_experts
from vkbackend.twins.device import NumpyDevice

# in many of these types, rows begin at odd multiples of 2 bytes, and in MXFP4 at any byte
DTYPES = shaderlib.weight_types()


def noise(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def numpy_devices(n: int, **limits: Any) -> list[NumpyDevice]:
    return [NumpyDevice(f"numpy.{i}", Limits(**limits)) for i in range(n)]


@st.composite
def tilings(draw: st.DrawFn, units: int, n: int, size: int) -> Ranges:
    """Draw n ranges, some empty, that divide `units * size` elements without gaps."""
    cuts = sorted(draw(st.lists(st.integers(0, units), min_size=n - 1, max_size=n - 1)))
    return tuple((b * size, e * size) for b, e in zip([0, *cuts], [*cuts, units], strict=True))


@st.composite
def loads(draw: st.DrawFn) -> tuple[Load, int]:
    dtype, n = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 5))
    block = block_of(dtype)[0]
    shape: tuple[int, ...] = (draw(st.integers(1, 13)), block * draw(st.integers(1, 4)))
    ndim = draw(st.integers(1, 3))
    home = draw(st.sampled_from([Home.WEIGHTS, Home.HOST]))
    if ndim == 1:
        state = draw(
            st.one_of(st.just(MIRRORED), tilings(shape[1] // block, n, block).map(lambda r: split(0, r)))
        )
        return Load("w", shape[1:], dtype, state, home), n
    axis = draw(st.integers(0, 1))
    tiles = tilings(shape[axis] // (block if axis else 1), n, block if axis else 1)
    if ndim == 2 and (segments := draw(st.lists(st.integers(1, 3), max_size=3))):
        units, size = draw(st.integers(1, 4)), block if axis else 1
        shape = (*shape[:axis], units * sum(segments) * size, *shape[axis + 1 :])
        state = split(axis, draw(tilings(units, n, 1)), [count * size for count in segments])
        return Load("w", shape, dtype, state, home), n
    if ndim == 2:
        state = draw(st.one_of(st.just(MIRRORED), tiles.map(lambda r: split(axis, r))))
        return Load("w", shape, dtype, state, home), n
    n_expert = draw(st.integers(1, 5))
    experts = draw(st.lists(tiles, min_size=n_expert, max_size=n_expert))
    return Load("w", (n_expert, *shape), dtype, split_experts(axis + 1, experts), home), n
