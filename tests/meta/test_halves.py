"""A large micro-batch produces the same results whether it runs as two interleaved halves or undivided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import MULTI, nmse, wide
from hypothesis import given
from hypothesis import strategies as st
from oracles.fixture import N_VOCAB, write
from oracles.fixtures import build
from runners import load_runner

from vkbackend import hazards
from vkbackend.meta import recorded_steps
from vkbackend.meta.step_kind import StepKind
from vkbackend.meta.ways import HOST_WRITTEN, PROVIDERS
from vkbackend.models.placement import traced_steps
from vkbackend.step import Run, cut_runs

TOKENS = np.random.default_rng(5).integers(3, 512, 64).tolist()
RUNS = [Run(1, 0, 5, 0), Run(0, 5, 27, 0)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced_steps, "HALVES_FROM", 32)


def in_steps(models: Path, devices: list[str], name: str, interleave: bool, **options: Any) -> np.ndarray:
    path = models / f"{name}.gguf"
    options = {"n_ctx": 96, "n_ubatch": 32, "n_slots": 2, "type_k": "f32", "type_v": "f32"} | options
    runner = load_runner(path, devices=devices, interleave=interleave, **options)
    try:
        rows = [runner.step(TOKENS[:32], RUNS, [30, 31]).copy()]
        assert any(kind.halves for kind in runner.mesh.steps.by_kind) is interleave
        rows.append(runner.step(TOKENS[32:], [Run(0, 0, 32, 27)], [31]).copy())
        rows.append(runner.step(TOKENS[:1], [Run(0, 0, 1, 59)], [0]).copy())
        # a requested output in the first half prevents the division of the batch
        rows.append(runner.step(TOKENS[:32], RUNS, [3, 31]).copy())
        return np.concatenate(rows)
    finally:
        runner.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        wide(pytest.param({"reduce_provider": "host-sum"})),
        wide(pytest.param({"reduce_provider": "visible"})),
        wide(pytest.param({"reduce_provider": "pieces", "submit_ahead": "all"})),
        wide(pytest.param({"reduce_provider": "copies", "reduce_type": "f16"})),
        wide(pytest.param({"reduce_provider": "scatter", "reduce_type": "bf16", "submit_ahead": 1})),
        wide(pytest.param({"reduce_provider": "scatter", "reduce_type": "f16"})),
        wide(pytest.param({"submit_ahead": 0})),
        wide(pytest.param({"submit_ahead": 1})),
    ],
    ids=str,
)
def test_halves_equal_one_piece(models: Path, options: dict[str, Any]) -> None:
    name = "stories-narrow-Q8_0"
    whole, halves = (
        in_steps(models, ["numpy"] * 3, name, interleave, **options) for interleave in (False, True)
    )
    assert nmse(halves, whole) <= 1e-12


@pytest.mark.wide
@pytest.mark.native
@pytest.mark.parametrize(
    ("provider", "signal"), [*((p, "flag") for p in PROVIDERS), *((p, "flag+event") for p in HOST_WRITTEN)]
)
@pytest.mark.parametrize("devices", [p for p in MULTI if p.id in ("0,0", "0,1")])
def test_every_way_on_devices(models: Path, devices: list[str], provider: str, signal: str) -> None:
    how = {"reduce_provider": provider, "reduce_signal": signal}
    usual, other = (in_steps(models, devices, "stories-narrow-Q8_0", True, **of) for of in ({}, how))
    assert np.array_equal(usual, other)


@pytest.mark.wide
@pytest.mark.native
@pytest.mark.parametrize("provider", HOST_WRITTEN)
@pytest.mark.parametrize("devices", [p for p in MULTI if p.id in ("0,0", "0,1")])
def test_one_call_on_devices(models: Path, devices: list[str], provider: str) -> None:
    how = {"reduce_provider": provider, "reduce_signal": "semaphore", "submit_ahead": "one-call"}
    usual, other = (in_steps(models, devices, "stories-narrow-Q8_0", True, **of) for of in ({}, how))
    assert np.array_equal(usual, other)


@pytest.mark.parametrize("devices", [p if p.id == "0,0,0" else wide(p) for p in MULTI])
def test_on_devices(models: Path, devices: list[str]) -> None:
    whole, halves = (
        in_steps(models, devices, "stories-narrow-Q8_0", interleave) for interleave in (False, True)
    )
    assert nmse(halves, whole) <= 1e-9


@pytest.mark.wide
def test_experts(models: Path) -> None:
    name = "stories-moe8x-Q4_0"
    whole, halves = (in_steps(models, ["numpy"] * 2, name, interleave) for interleave in (False, True))
    assert nmse(halves, whole) <= 1e-12


@pytest.mark.parametrize("name", ["qwen35", wide(pytest.param("kimi-linear"))])
def test_a_recurrent_sequence_across_both_halves(tmp_path: Path, name: str) -> None:
    path = write(build(name), tmp_path / f"{name}.gguf")
    tokens = [token % N_VOCAB for token in TOKENS]
    results = []
    for interleave in (False, True):
        options: Any = {"n_ctx": 96, "n_ubatch": 32, "n_slots": 2, "type_k": "f32", "type_v": "f32"}
        runner = load_runner(path, devices=["numpy"] * 2, interleave=interleave, **options)
        try:
            rows = [runner.step(tokens[:32], RUNS, [30, 31]).copy()]
            assert any(kind.halves for kind in runner.mesh.steps.by_kind) is interleave
            rows.append(runner.step(tokens[32:], [Run(0, 0, 32, 27)], [31]).copy())
            rows.append(runner.step(tokens[:1], [Run(0, 0, 1, 59)], [0]).copy())
            results.append(np.concatenate(rows))
        finally:
            runner.close()
    assert nmse(results[1], results[0]) <= 1e-9  # the chunks of a divided batch begin at different rows


def test_a_segment_waits_for_the_exchange_before_the_last(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = []
    derive = recorded_steps.derive_barriers
    monkeypatch.setattr(recorded_steps, "derive_barriers", lambda r: placed.append(derive(r)) or placed[-1])
    path = models / "stories-narrow-Q8_0.gguf"
    runner = load_runner(path, devices=["numpy"] * 2, interleave=True, n_ctx=64, n_ubatch=32)
    step = runner.mesh.recorded_step(StepKind.of_run(32, 1, halves=True))
    n_layer = runner.model.n_layer
    assert step.lag == 2 and sum(r is not None for r in step.reduces) == 4 * n_layer - 1
    lanes = [r.lane for r in step.reduces if r]
    # logits are requested only for rows in the second half
    assert lanes[:-1] == [0, 1] * (2 * n_layer - 1) and lanes[-1] == 1
    assert len(step.reduces) == step.executables[0].n_segments - 1
    assert not [hazard for recording in placed for hazard in hazards.check(recording)]
    runner.close()


@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=6), at=st.integers(0, 60), first=st.integers(0, 50)
)
def test_cut_runs_tile_the_rows(rows: list[int], at: int, first: int) -> None:
    runs, row = [], 0
    for slot, n in enumerate(rows):
        runs.append(Run(slot, row, n, first + slot))
        row += n
    front, back = cut_runs(runs, at)
    positions = [(r.slot, r.first_row + i, r.first_pos + i) for r in runs for i in range(r.n_rows)]
    halves = [(r.slot, r.first_row + i, r.first_pos + i) for r in front for i in range(r.n_rows)]
    halves += [(r.slot, at + r.first_row + i, r.first_pos + i) for r in back for i in range(r.n_rows)]
    assert halves == positions
