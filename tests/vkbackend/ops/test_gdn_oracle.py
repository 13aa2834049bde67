"""The gated delta net, row by row and in chunks, against the oracle beside the checkout
(`../shared/oracles/gdn_oracle.py`): outputs and states of every sequence, on numpy and on Vulkan devices.
"""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from device_sets import nmse

from vkbackend.limits import Limits
from vkbackend.runtime import Device
from vkbackend.tools.op_cases.recurrent import DeltaNet, DeltaScan, StateRun
from vkbackend.tools.op_cases.setup import Placed
from vkbackend.twins.device import NumpyDevice

EXACT = 1e-7  # NMSE, of the outputs and of the states
LENGTHS = (1, 4, 33, 64, 65, 127, 200)
SHAPES = (  # n_k, size, repeat, sequences: the oracle's own, and those of llama.cpp's tests of the op
    (4, 64, 1, 1), (4, 64, 1, 2), (4, 64, 2, 1), (4, 32, 3, 2), (2, 128, 2, 1), (16, 64, 1, 2), (8, 32, 2, 2),
    (32, 16, 1, 1),
)  # fmt: skip
QUICK = {((4, 32, 3, 2), False, 65), ((32, 16, 1, 1), True, 33)}  # on devices; the others are wide
WAYS = pytest.mark.parametrize("way", [DeltaNet, DeltaScan], ids=["rows", "chunks"])


@pytest.fixture(scope="module")
def oracle(shared: Path) -> ModuleType:
    path = shared / "oracles" / "gdn_oracle.py"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    spec = spec_from_file_location("gdn_oracle", path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(
    oracle: ModuleType, device: Any, way: type[DeltaNet], shape: tuple[int, ...], rows: int, kda: bool,
    tiled: bool,
) -> None:  # fmt: skip
    """Sequences of `rows` rows from a state, and one of half as many that begins: its state is zeros."""
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
        found = {
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
        part = slice(row, row + n)
        heads = {name: a[name][None, part].reshape(1, n, n_k, size) for name in ("q", "k")}
        if not tiled:  # neighbouring value heads read one key head; the oracle's lie n_k apart
            heads = {name: np.repeat(values, repeat, axis=2) for name, values in heads.items()}
        before = a["state"][read].swapaxes(1, 2) if first_pos else np.zeros((n_k * repeat, size, size))
        v = a["v"][None, part].reshape(1, n, n_k * repeat, size)
        inputs = heads["q"], heads["k"], v, a["g"][None, part], a["beta"][None, part], before[None]
        want, states = oracle.recurrent(*inputs)
        assert nmse(found["y"][part], want[0]) <= EXACT
        assert nmse(found["state"][written].swapaxes(1, 2), states[0, 0]) <= EXACT
        row += n


CASES = [
    (shape, kda, rows, f"{'-'.join(map(str, shape))}-{'channel' if kda else 'head'}-{rows}")
    for shape, kda, rows in product(SHAPES, (False, True), LENGTHS)
]


@WAYS
@pytest.mark.parametrize(
    ("shape", "kda", "rows"),
    [
        pytest.param(*case, id=name, marks=[] if case[0] == (4, 64, 2, 1) else pytest.mark.wide)
        for *case, name in CASES
    ],
)
def test_twins(oracle: ModuleType, way: type[DeltaNet], shape: tuple[int, ...], rows: int, kda: bool) -> None:
    for tiled in (False, True):
        check(oracle, NumpyDevice("numpy"), way, shape, rows, kda, tiled)


@WAYS
@pytest.mark.parametrize(
    ("shape", "kda", "rows"),
    [
        pytest.param(*case, id=name, marks=[] if tuple(case) in QUICK else pytest.mark.wide)
        for *case, name in CASES
    ],
)
def test_shaders(
    oracle: ModuleType, device: Device, way: type[DeltaNet], shape: tuple[int, ...], rows: int, kda: bool
) -> None:
    for tiled in (False, True):
        check(oracle, device, way, shape, rows, kda, tiled)


@pytest.mark.wide
@pytest.mark.parametrize("rows", LENGTHS)
def test_the_oracle_agrees_with_itself(oracle: ModuleType, rows: int) -> None:
    rng = np.random.default_rng(rows)
    for width in (1, 32):
        unit = rng.uniform(-1, 1, (2, 1, rows, 4, 32))
        q, k = unit / np.linalg.norm(unit, axis=-1, keepdims=True)
        v, g = rng.uniform(-0.3, 5, (1, rows, 8, 32)), rng.uniform(-2, -1e-4, (1, rows, 8, width))
        inputs = q, k, v, g, rng.uniform(0, 1, (1, rows, 8)), rng.uniform(-1, 1, (1, 8, 32, 32))
        (want, states), (found, state) = oracle.recurrent(*inputs), oracle.chunked(*inputs)
        assert nmse(found, want) <= 1e-20 and nmse(state, states[0]) <= 1e-20
