"""The tests cover fused and scaled experts, groups of experts, near ties, and devices without a share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from device_sets import DEVICE_SETS, covering, nmse, only, product, wide
from oracles.fixture import MXFP4, N_CTX, PROMPT, Q8_0, Fixture, quantized, write
from oracles.fixtures import build
from places import GOLDEN
from runners import load_runner

from vkbackend.meta.step_kind import StepKind, bucket
from vkbackend.models.export import write_gguf
from vkbackend.models.gguf.reader import GGUF
from vkbackend.step import Run

N = len(PROMPT)
ROWS = bucket(N)
N_EXPERT = 8


def layers(fixture: Fixture) -> list[str]:
    return [
        name.removesuffix("ffn_gate_inp.weight")
        for name in fixture.tensors
        if name.endswith("ffn_gate_inp.weight")
    ]


def run(
    path: Path, devices: list[str], export: Path | None = None, **options: Any
) -> tuple[np.ndarray, dict[str, list[np.ndarray]]]:
    options = {
        "n_ctx": N_CTX,
        "n_ubatch": N_CTX,
        "type_k": "f32",
        "type_v": "f32",
        "reduce_type": "f32",
    } | options
    runner = load_runner(path, devices=devices, keep_values=True, **options)
    try:
        logits = runner.step(PROMPT, [Run(0, 0, N, 0)], range(N)).copy()
        chosen = {
            label: [
                device.read(view).view(np.uint32).reshape(view.shape)[:N]
                for device, view in zip(runner.mesh.devices, views, strict=True)
                if view is not None
            ]
            for label, views in runner.mesh.recorded_step(StepKind.of_run(ROWS, ROWS)).values.items()
            if label.endswith("moe_ids")
        }
        if export:
            with GGUF.open(path) as source:
                mesh = runner.mesh
                write_gguf(export, source, mesh.devices, mesh.weights, runner.model.weights())
        return logits, chosen
    finally:
        runner.close()


def changed(folder: Path, name: str, change: Callable[[Fixture, str], None], **keys: Any) -> Path:
    fixture = build(name)
    fixture.keys |= keys
    for prefix in layers(fixture):
        change(fixture, prefix)
    return write(fixture, folder / f"{name}-changed.gguf")


def unchanged(folder: Path, name: str) -> Path:
    return write(build(name), folder / f"{name}.gguf")


@pytest.mark.parametrize(
    ("name", "devices"),
    covering(["gpt-oss", "glm4moe"], [pytest.param(["numpy"], id="1"), pytest.param(["numpy"] * 3, id="3")]),
)
def test_gate_and_up_in_one_tensor(tmp_path: Path, name: str, devices: list[str]) -> None:
    def fuse(fixture: Fixture, prefix: str) -> None:
        for kind in ("weight", "bias"):
            parts = [fixture.tensors.pop(f"{prefix}ffn_{part}_exps.{kind}", None) for part in ("gate", "up")]
            if parts[0] is not None:
                fixture.put(f"{prefix}ffn_gate_up_exps.{kind}", np.concatenate(parts, axis=1))

    path = changed(tmp_path, name, fuse)
    want, _ = run(unchanged(tmp_path, name), devices)
    got, _ = run(path, devices, tmp_path / "copy.gguf")
    assert np.array_equal(got, want)
    with GGUF.open(path) as source, GGUF.open(tmp_path / "copy.gguf") as copy:
        assert list(copy.tensors) == list(source.tensors)
        assert all(np.array_equal(copy.data(t), source.data(t)) for t in source.tensors)


def test_factors_of_experts(tmp_path: Path) -> None:
    """The factors are powers of two, so no product rounds. A factor may scale the result of ffn_down or its
    weights."""
    factors = np.float32(2.0) ** np.arange(-4, N_EXPERT - 4, dtype=np.float32)

    def scale(fixture: Fixture, prefix: str) -> None:
        fixture.put(f"{prefix}ffn_down_exps.scale", factors)

    def multiply(fixture: Fixture, prefix: str) -> None:
        down = f"{prefix}ffn_down_exps.weight"
        fixture.tensors[down] = fixture.tensors[down] * factors[:, None, None]

    got, _ = run(changed(tmp_path, "qwen3moe", scale), ["numpy"] * 3)
    want, _ = run(changed(tmp_path, "qwen3moe", multiply), ["numpy"])
    assert nmse(got, want) <= 1e-13
    assert nmse(got, run(unchanged(tmp_path, "qwen3moe"), ["numpy"])[0]) > 1e-3


@pytest.mark.parametrize(
    "devices", [wide(p) if p.id == "0" else p for p in DEVICE_SETS if p.id in ("0", "0,0,0")]
)
def test_experts_of_the_best_groups(tmp_path: Path, devices: list[str]) -> None:
    """If the router uses one of four groups, this group contains both chosen experts. If the router uses all
    groups, grouping changes nothing."""
    changed_path = changed(
        tmp_path, "glm4moe", lambda fixture, prefix: None, expert_group_count=4, expert_group_used_count=1
    )
    want, _ = run(changed_path, ["numpy"])
    got, chosen = run(changed_path, devices)
    assert nmse(got, want) <= 1e-6
    for ids in chosen.values():
        assert all(np.array_equal(ids[0], other) for other in ids)
        assert (ids[0][:, 0] // 2 == ids[0][:, 1] // 2).all() and len(np.unique(ids[0])) > 2
    every = changed(
        tmp_path, "glm4moe", lambda fixture, prefix: None, expert_group_count=4, expert_group_used_count=4
    )
    free, free_ids = run(unchanged(tmp_path, "glm4moe"), ["numpy"])
    assert np.array_equal(run(every, ["numpy"])[0], free) and nmse(want, free) > 1e-3
    assert any((ids[0][:, 0] // 2 != ids[0][:, 1] // 2).any() for ids in free_ids.values())


@pytest.mark.parametrize(
    ("name", "devices"),
    only(
        product(
            ["glm4moe", "gpt-oss"],
            [pytest.param(["numpy"] * 3, id="numpy*3")] + [p for p in DEVICE_SETS if p.id == "0,1"],
        ),
        "glm4moe-numpy*3",  # test_moe_and_qwen.py has the same test for devices of two drivers
    ),
)
def test_all_devices_break_near_ties_alike(tmp_path: Path, name: str, devices: list[str]) -> None:
    """Groups of three router rows are equal except for rounding. All devices still choose the same
    experts."""

    def tie(fixture: Fixture, prefix: str) -> None:
        rng = np.random.default_rng(3)
        of = np.arange(N_EXPERT) // 3 * 3
        router = fixture.tensors[f"{prefix}ffn_gate_inp.weight"][of]
        noise = rng.choice(np.float32([1, 1 + 2**-23, 1 - 2**-24]), router.shape)
        fixture.tensors[f"{prefix}ffn_gate_inp.weight"] = router * noise
        for bias in ("ffn_gate_inp.bias", "exp_probs_b.bias"):
            if prefix + bias in fixture.tensors:
                fixture.tensors[prefix + bias] = fixture.tensors[prefix + bias][of]

    path = changed(tmp_path, name, tie)
    logits, chosen = run(path, devices)
    assert np.isfinite(logits).all()
    pairs = set()
    for label, ids in chosen.items():
        assert all(np.array_equal(ids[0], other) for other in ids), label
        pairs |= {(a // 3, a % 3, b % 3) for a, b in ids[0].tolist() if a // 3 == b // 3}
    assert len(pairs) > 6, "rounding decided nothing"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("devices", "bound"),
    [pytest.param(["numpy"] * n, 1e-9, id=f"numpy*{n}") for n in (1, 2, 3, 4)]
    + [pytest.param(*p.values, 1e-6, id=p.id, marks=p.marks) for p in DEVICE_SETS],
)
def test_published_formats_of_gpt_oss(tmp_path: Path, devices: list[str], bound: float) -> None:
    """Store the experts in MXFP4 with biases, and other matrices in Q8_0."""
    fixture, blocks = build("gpt-oss"), {}
    for name, values in fixture.tensors.items():
        kind = MXFP4 if name.endswith("_exps.weight") else Q8_0
        if kind == MXFP4 or quantized(name, values) is not None:
            blocks[name] = gguf.quants.quantize(values, kind), kind
    assert [kind for _, kind in blocks.values()].count(MXFP4) == 3 * 5
    path = write(fixture, tmp_path / "blocks.gguf", blocks=blocks)
    fixture.tensors |= {name: gguf.quants.dequantize(*stored) for name, stored in blocks.items()}
    want, ids = run(write(fixture, tmp_path / "values.gguf"), ["numpy"])
    got, chosen = run(path, devices, tmp_path / "copy.gguf")
    assert nmse(got, want) <= bound
    assert all(
        np.array_equal(of_device, ids[label][0]) for label, stored in chosen.items() for of_device in stored
    )
    assert nmse(want, np.load(GOLDEN / "gpt-oss.npz")["logits"]) > 1e-4
    assert path.read_bytes() == (tmp_path / "copy.gguf").read_bytes()


SPLITS: list[Any] = [
    pytest.param({"tensor_split": (0, 1, 1)}, id="0:1:1"),
    wide(pytest.param({"tensor_split": (5, 3, 2)}, id="5:3:2")),
    wide(pytest.param({"override_tensor": (("_shexp", "1"),)}, id="shared on 1")),
    pytest.param({"override_tensor": (("_exps", "CPU"), ("shexp", "host"))}, id="host"),
    wide(pytest.param({"split_policy": "llama.cpp"}, id="llama.cpp")),
    wide(pytest.param({"split_mode": "layer"}, id="layer")),
]


@pytest.mark.parametrize(("options", "name"), covering(SPLITS, ["qwen2moe", "glm4moe"]))
def test_splits_of_a_shared_expert(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    path = unchanged(tmp_path, name)
    want, _ = run(path, ["numpy"])
    got, _ = run(path, ["numpy"] * 3, **options)
    assert nmse(got, want) <= 1e-9
