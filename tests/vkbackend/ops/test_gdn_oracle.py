"""The gated delta net agrees with float64 (`gated_delta_float64.py`), per row and in chunks, on numpy and
Vulkan."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from typing import Any

import gated_delta_float64 as oracle
import numpy as np
import pytest
from device_sets import covering, nmse
from places import SHARED

from vkbackend.limits import Limits
from vkbackend.runtime import Device
from vkbackend.tools.op_cases.recurrent import DeltaNet, DeltaScan, StateRun
from vkbackend.tools.op_cases.setup import Placed
from vkbackend.twins.device import NumpyDevice

EXACT = 1e-7
LENGTHS = (1, 4, 33, 64, 65, 127, 200)
SHAPES = (  # (n_k, size, repeat, sequences); some shapes come from llama.cpp's tests of the op
    (4, 64, 1, 1), (4, 64, 1, 2), (4, 64, 2, 1), (4, 32, 3, 2), (2, 128, 2, 1), (16, 64, 1, 2), (8, 32, 2, 2),
    (32, 16, 1, 1),
)  # fmt: skip
QUICK = {((4, 32, 3, 2), False, 65)}
WAYS = pytest.mark.parametrize("way", [DeltaNet, DeltaScan], ids=["rows", "chunks"])


def check(
    device: Any, way: type[DeltaNet], shape: tuple[int, ...], rows: int, kda: bool, tiled: bool
) -> None:
    n_k, size, repeat, n_seqs = shape
    runs: list[StateRun] = [(3 + i, rows, 2 * i, 2 * i + 1) for i in range(n_seqs)]
    runs.append((0, -(-rows // 2), 2 * n_seqs, 2 * n_seqs))
    case = way(n_k, size, repeat, tuple(runs), 0, kda, tiled, least=-20.0 if rows < 50 else -2.0)
    setup = case.setup(np.random.default_rng([rows, *shape]))
    limits = getattr(device, "limits", Limits())
    placed = Placed(device, setup)
    try:
        device.run(placed.record(limits))
        raw = device.read(placed.whole)
        outputs = {
            name: raw[view.offset : view.end].view(np.float32).reshape(view.shape)
            for name, view in placed.views.items()
            if name in ("y", "state")
        }
    finally:
        placed.close()
    a = {
        name: np.asarray(t.raw, np.float64).reshape(t.shape)
        for name, t in setup.tensors.items()
        if t.raw is not None
    }
    row = 0
    for first_pos, n, read, written in runs:
        part, n_heads = slice(row, row + n), n_k * repeat
        v, y = a["v"][part].reshape(n, n_heads, size), outputs["y"][part].reshape(n, n_heads, size)
        q, k = (a[name][part].reshape(n, n_k, size) for name in ("q", "k"))
        for h in range(n_heads):
            key_head = h % n_k if tiled else h // repeat
            before = a["state"][read][h] if first_pos else np.zeros((size, size))
            inputs = q[:, key_head], k[:, key_head], v[:, h], a["g"][part, h], a["beta"][part, h], before
            want, state = oracle.recurrent(*inputs)
            assert nmse(y[:, h], want) <= EXACT
            assert nmse(outputs["state"][written][h], state) <= EXACT
        row += n


CASES = [
    (shape, kda, rows, f"{'-'.join(map(str, shape))}-{'channel' if kda else 'head'}-{rows}")
    for shape, kda, rows in product(SHAPES, (False, True), LENGTHS)
]


@WAYS
@pytest.mark.parametrize(
    ("shape", "kda", "rows"),
    [
        pytest.param(
            *case,
            id=name,
            marks=[] if case[0] == (4, 64, 2, 1) and i % 2 and case[2] < 200 else pytest.mark.wide,
        )
        for i, (*case, name) in enumerate(CASES)
    ],
)
def test_twins(way: type[DeltaNet], shape: tuple[int, ...], rows: int, kda: bool) -> None:
    for tiled in (False, True):
        check(NumpyDevice("numpy"), way, shape, rows, kda, tiled)


@WAYS
@pytest.mark.parametrize(
    ("shape", "kda", "rows"),
    [
        pytest.param(*case, id=name, marks=[] if tuple(case) in QUICK else pytest.mark.wide)
        for *case, name in CASES
    ],
)
def test_shaders(device: Device, way: type[DeltaNet], shape: tuple[int, ...], rows: int, kda: bool) -> None:
    for tiled in (False, True):
        check(device, way, shape, rows, kda, tiled)


@pytest.mark.parametrize(("rows", "width"), covering(LENGTHS, [1, 32]))
def test_the_oracle_agrees_with_itself(rows: int, width: int) -> None:
    inputs = drawn(rows, width)
    (want, state), (y, solved) = oracle.recurrent(*inputs), oracle.solved(*inputs)
    assert nmse(y, want) <= 1e-20 and nmse(solved, state) <= 1e-20


def drawn(rows: int, width: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(rows)
    unit = rng.uniform(-1, 1, (2, rows, 32))
    q, k = unit / np.linalg.norm(unit, axis=-1, keepdims=True)
    v, g = rng.uniform(-0.3, 5, (rows, 32)), rng.uniform(-2, -1e-4, (rows, width))
    return q, k, v, g, rng.uniform(0, 1, rows), rng.uniform(-1, 1, (32, 32))


if (THEIRS := SHARED / "oracles" / "gdn_oracle.py").is_file():

    @pytest.mark.parametrize(("rows", "width"), covering(LENGTHS, [1, 32]))
    def test_another_oracle_agrees(rows: int, width: int) -> None:
        """The other oracle follows ggml's sources. Its first dimension is the sequence, and its states are
        [values, keys]."""
        spec = spec_from_file_location("gdn_oracle", THEIRS)
        assert spec and spec.loader
        spec.loader.exec_module(theirs := module_from_spec(spec))
        *inputs, state = drawn(rows, width)
        y, after = theirs.recurrent(*(x[None, :, None] for x in inputs), state.T[None, None])
        want, states = oracle.recurrent(*inputs, state)
        assert nmse(y[0, :, 0], want) <= 1e-20 and nmse(after[0, 0, 0].T, states) <= 1e-20
