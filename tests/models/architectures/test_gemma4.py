"""gemma4 adds two sums before one exchange. Its files contain tensors that are not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import nmse, wide
from oracles.fixture import PROMPT, write
from oracles.fixtures import build
from runners import load_runner

from vkbackend.errors import GGUFError
from vkbackend.meta.step_kind import StepKind
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.export import write_gguf
from vkbackend.models.gguf.reader import GGUF
from vkbackend.step import Run

TOKENS = PROMPT[:16]


def loaded(path: Path, n: int, **options: Any) -> Runner:
    how: dict[str, Any] = {
        "n_ctx": 32,
        "n_ubatch": 16,
        "type_k": "f32",
        "type_v": "f32",
        "reduce_type": "f32",
    }
    return load_runner(path, devices=["numpy"] * n, **how | options)


def logits_and_writers(path: Path, n: int, **options: Any) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """Return a step's logits, and for each exchange the devices that write to it. Run the step again after
    all scratch has become NaN."""
    runner = loaded(path, n, **options)
    try:
        both = []
        for _ in range(2):
            both.append(runner.step(TOKENS, [Run(0, 0, len(TOKENS), 0)], range(len(TOKENS))).copy())
            for arena in runner.mesh.steps.arenas:
                arena.host[:] = 0xFF
        assert np.array_equal(*both)
        return both[0], [r.writers for r in runner.mesh.recorded_step(StepKind.of_run(16, 16)).reduces]
    finally:
        runner.close()


@pytest.mark.parametrize("shares", [wide(pytest.param(None)), (5, 1, 1, 1), wide(pytest.param((1, 0, 1, 3)))])
def test_dense_and_expert_sums_are_exchanged_together(tmp_path: Path, shares: Any) -> None:
    """One of the four devices holds columns of the experts but none of the dense FFN."""
    path = write(build("gemma4+experts"), tmp_path / "model.gguf", quantize=True)
    want, none = logits_and_writers(path, 1)
    got, writers = logits_and_writers(path, 4, tensor_split=shares)
    assert none == [] and len(writers) == 2 * 4
    assert nmse(got, want) <= 1e-9
    runner = loaded(path, 4, tensor_split=shares)
    plans = runner.layout.plans
    runner.close()
    dense = [sum(end > begin for begin, end in plan.ranges["ffn"]) for plan in plans]
    assert any(n < len(w) for n, w in zip(dense, writers[1::2], strict=True)), (dense, writers)


@pytest.mark.wide
def test_whole_layers_on_devices_need_no_sums(tmp_path: Path) -> None:
    path = write(build("gemma4+experts"), tmp_path / "model.gguf")
    got, writers = logits_and_writers(path, 2, split_mode="layer")
    assert nmse(got, logits_and_writers(path, 1)[0]) <= 1e-12
    assert len(writers) == 1, "the residual is handed on, once"


def test_unread_k_and_v_are_optional(tmp_path: Path) -> None:
    model = build("gemma4+shared")
    full = write(model, tmp_path / "full.gguf")
    for il in range(4, 7):
        for name in ("attn_k", "attn_v", "attn_k_norm"):
            del model.tensors[f"blk.{il}.{name}.weight"]
    bare = write(model, tmp_path / "bare.gguf")
    assert np.array_equal(logits_and_writers(full, 1)[0], logits_and_writers(bare, 1)[0])


@pytest.mark.parametrize("name", [wide(pytest.param("gemma4+experts")), "gemma4+shared"])
def test_export_equals_the_file(tmp_path: Path, name: str) -> None:
    path, out = write(build(name), tmp_path / "model.gguf"), tmp_path / "out.gguf"
    runner = loaded(path, 3)
    try:
        with GGUF.open(path) as source:
            write_gguf(out, source, runner.mesh.devices, runner.mesh.weights, runner.model.weights())
    finally:
        runner.close()
    assert out.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("fixture", "change", "message"),
    [
        ("gemma4+experts", {"blk.2.ffn_gate_inp.scale": None}, "'blk.2.ffn_gate_inp.scale' is missing"),
        ("gemma4+experts", {"blk.1.ffn_gate_inp.scale": np.ones(63)}, r"\(63,\), expected f32 \(64,\)"),
        ("gemma4", {"blk.0.layer_output_scale.weight": np.ones(2)}, r"expected f32 \(1,\)"),
        ("gemma4", {"attention.shared_kv_layers": 7}, "7 of 7 layers share"),
        ("gemma4+shared", {"attention.shared_kv_layers": 6}, "only the first 1 layers have k and v"),
        ("gemma4", {"attention.sliding_window_pattern": [True] * 6}, "6 values for 7 layers"),
    ],
)
def test_refusals(tmp_path: Path, fixture: str, change: dict[str, Any], message: str) -> None:
    model = build(fixture)
    for name, value in change.items():
        if name in model.keys:
            model.keys[name] = value
        elif value is None:
            del model.tensors[name]
        else:
            model.tensors[name] = value.astype(np.float32)
    with pytest.raises(GGUFError, match=message):
        loaded(write(model, tmp_path / "model.gguf"), 1)
