"""gemma3n has sparse gates and stacked matrices. Files with wrong metadata are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import nmse
from exchanges import planned
from oracles.fixture import PROMPT, Fixture, write
from oracles.fixtures import build
from runners import load_runner

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.meta.step_kind import StepKind
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.export import write_gguf
from vkbackend.models.gguf.reader import GGUF
from vkbackend.step import Run

TOKENS = PROMPT[:8]


def two_layers() -> Fixture:
    fixture = build("gemma3n")
    fixture.keys |= {"block_count": 2, "attention.shared_kv_layers": 1}
    fixture.keys["activation_sparsity_scale"] = fixture.keys["activation_sparsity_scale"][:2]
    fixture.tensors = {
        name: values
        for name, values in fixture.tensors.items()
        if not name.startswith("blk.") or name[4:6] in ("0.", "1.")
    }
    wide = 2 * fixture.keys["embedding_length_per_layer_input"]
    fixture.tensors["per_layer_token_embd.weight"] = fixture["per_layer_token_embd.weight"][:, :wide].copy()
    fixture.tensors["per_layer_model_proj.weight"] = fixture["per_layer_model_proj.weight"][:wide]
    return fixture


def test_any_shares_and_export(tmp_path: Path) -> None:
    path, out = write(two_layers(), tmp_path / "model.gguf", quantize=True), tmp_path / "out.gguf"
    results = []
    for n, shares in ((1, None), (3, (5, 0, 1)), (4, (1, 1, 1, 2))):
        runner = load_runner(
            path,
            devices=["numpy"] * n,
            tensor_split=shares,
            n_ctx=32,
            n_ubatch=16,
            type_k="f32",
            type_v="f32",
        )
        try:
            results.append(runner.step(TOKENS, [Run(0, 0, 8, 0)], range(8)).copy())
            if n == 4:
                reduces = [
                    r for r in runner.mesh.recorded_step(StepKind.of_run(8, 8)).reduces if not r.gather
                ]
                assert [r.elements for r in reduces] == planned(runner, 8)
                assert [r.wire for r in reduces if r.elements == 2 * 8] == ["f32"] * 2
                with GGUF.open(path) as source:
                    write_gguf(out, source, runner.mesh.devices, runner.mesh.weights, runner.model.weights())
        finally:
            runner.close()
    assert nmse(results[1], results[0]) <= 1e-6 and nmse(results[2], results[0]) <= 1e-6  # the wire is F16
    assert out.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"altup.active_idx": 1}, UnsupportedModel, "altup.active_idx = 1 is not supported"),
        ({"altup.num_inputs": 9}, GGUFError, r"altup.num_inputs is 9, expected 1..8"),
        ({"activation_sparsity_scale": [1.0]}, GGUFError, "has 1 values for 2 layers"),
        ({"embedding_length_per_layer_input": 0}, GGUFError, "per_layer_input is 0, expected 1"),
        ({"attention.shared_kv_layers": 2}, GGUFError, "2 of 2 layers share"),
    ],
)
def test_refusals(tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str) -> None:
    fixture = two_layers()
    fixture.keys |= change
    with GGUF.open(write(fixture, tmp_path / "model.gguf")) as gguf, pytest.raises(error, match=message):
        load_model(gguf)


def test_the_cut_decides_how_many_gates_are_used(tmp_path: Path) -> None:
    """The first layer uses one gate in twenty, and the second layer all gates."""
    fixture = two_layers()
    fixture.keys["activation_sparsity_scale"] = [1.6448536, -np.inf]
    path = write(fixture, tmp_path / "model.gguf")
    runner = load_runner(path, devices=["numpy"], n_ctx=32, n_ubatch=16, keep_values=True)
    try:
        runner.step(TOKENS, [Run(0, 0, 8, 0)], range(8))
        values = runner.mesh.recorded_step(StepKind.of_run(8, 8)).values
        [view] = values["blk.0.gaussian_topk"]
        assert view and "blk.1.gaussian_topk" not in values
        kept = runner.mesh.devices[0].read(view).view(np.float32) > 0
    finally:
        runner.close()
    assert kept.size == 8 * 96 and 0.03 < kept.mean() < 0.07, kept.mean()
