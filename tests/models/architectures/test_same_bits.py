"""The logits of 2 to 8 rows in one step equal the same rows' logits in one-row steps, bit for bit.
Speculative decoding relies on this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS, all_wide_but, in_turn, product
from oracles.fixture import PROMPT, write
from oracles.fixtures import FIXTURES, build
from prefills import opened

from vkbackend import env
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.step import Run

# The rows after 27 stored positions cross a border between 32-cell blocks, and windows of 12 positions.
STORED, ROWS = 27, (2, 3, 5, 8)
MOST = max(ROWS)
# With 8 blocks of cells, a GPU divides a row's keys among two dispatches.
OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_ubatch": 32, "reduce_type": "f32", "n_slots": 2 * len(ROWS) + 2}
WAYS = {"the driver's ops": None, "portable ops": "VKBACKEND_FLOOR", "a GPU's ops": "VKBACKEND_AS_GPU"}
SETS = [p for p in DEVICE_SETS if p.id in ("0", "0,0")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("same bits")


def after(runner: Runner, slot: int) -> int:
    runner.step(PROMPT[:STORED], [Run(slot, 0, STORED, 0)], [])
    return slot


def rows_of(runner: Runner, *runs: tuple[int, int]) -> np.ndarray:
    """Return the logits of one step with a run for each (slot, number of rows)."""
    tokens, step = list[int](), list[Run]()
    for slot, n in runs:
        step.append(Run(slot, len(tokens), n, STORED))
        tokens += PROMPT[STORED : STORED + n]
    return runner.step(tokens, step, range(len(tokens))).copy()


def one_by_one(runner: Runner, slot: int) -> np.ndarray:
    rows = []
    for pos in range(STORED, STORED + MOST):
        rows.append(runner.step([PROMPT[pos]], [Run(slot, 0, 1, pos)], [0])[0].copy())
    return np.array(rows)


ALONE, PAIR = SETS
DRIVER = next(iter(WAYS))
# By default, a few models with different caches and states run with the ops that other tests have compiled,
# and with one recorded number of rows.
FEW = [*product(["llama"], [ALONE]), *product(["lfm2", "mamba2"], [PAIR])]


# Every model runs with all op choices, alternately on one device and on two.
TURNS = [
    pytest.param(*p.values, way, id=f"{p.id}-{way}", marks=p.marks)
    for p, way in zip(3 * SETS, 2 * [*WAYS], strict=True)
]


def cases() -> list[Any]:
    quick = [pytest.param(*p.values, DRIVER, ROWS[-2:], id=f"{p.id}-{DRIVER}", marks=p.marks) for p in FEW]
    every = [pytest.param(*p.values, ROWS, id=p.id, marks=p.marks) for p in in_turn(FIXTURES, TURNS, 3)]
    return all_wide_but(quick, every)


@pytest.mark.parametrize(("name", "devices", "way", "counts"), cases())
def test_rows_of_a_step(
    folder: Path,
    name: str,
    devices: list[str],
    way: str,
    counts: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = folder / f"{name}.gguf"
    if not path.exists():
        write(build(name), path)
    if variable := WAYS[way]:
        monkeypatch.setenv(variable, "1")
    assert env.exact()
    with opened(path, devices, **OPTIONS) as runner:
        want = one_by_one(runner, after(runner, 0))
        for slot, n in enumerate(counts, 1):
            got = rows_of(runner, (after(runner, slot), n))
            assert np.array_equal(got, want[:n]), f"{n} rows differ from single rows"
        a, b, c = (after(runner, slot) for slot in (5, 6, 7))
        got = rows_of(runner, (a, 1), (b, 3), (c, 4))
        assert np.array_equal(got, want[[0, 0, 1, 2, 0, 1, 2, 3]]), "rows of three sequences differ"
