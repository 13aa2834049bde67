"""Mamba and RWKV-7 models on devices with any shares produce the same logits as on one device. The
exchanges equal the plan, and slots can move to other devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import covering, nmse, only, some
from exchanges import planned
from oracles.fixture import PROMPT, Fixture, write
from oracles.fixtures import build
from places import GOLDEN
from runners import load_runner
from slot_journey import check_slot_journey

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.meta.step_kind import StepKind
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.gguf.reader import GGUF
from vkbackend.step import Run

pytestmark = pytest.mark.no_vulkan

NAMES = ("mamba2", "mamba", "jamba", "rwkv7", "granitehybrid", "falcon-h1", "nemotron_h_moe")
SHARES = ([0, 1, 0], [1, 0, 3], [2, 1, 1], [9, 1, 9])
F32: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "reduce_type": "f32", "n_ctx": 96}
N = len(PROMPT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state_space")


def model(folder: Path, name: str) -> Path:
    path = folder / f"{name}.gguf"
    return path if path.exists() else write(build(name), path)


@pytest.mark.parametrize(("name", "shares"), some(covering(NAMES, SHARES), 5))
def test_uneven_and_empty_shares(folder: Path, name: str, shares: list[float]) -> None:
    options = F32 | {"n_ubatch": 64, "tensor_split": shares}
    runner = load_runner(model(folder, name), devices=["numpy"] * 3, **options)
    try:
        logits = runner.step(PROMPT[:40], [Run(0, 0, 40, 0)], range(40)).copy()
        rest = [runner.step([PROMPT[i]], [Run(0, 0, 1, i)], [0]).copy() for i in range(40, N)]
        want = np.load(GOLDEN / f"{name}.npz")["logits"]
        assert nmse(np.concatenate([logits, *rest]), want) <= 1e-9
        for rows in (1, 48):
            reduces = runner.mesh.recorded_step(StepKind.of_run(rows, rows)).reduces
            several = sum(share > 0 for share in shares) > 1
            assert [r.elements for r in reduces] == (planned(runner, rows) if several else [])
            assert sum(4 * r.elements for r in reduces) == 4 * sum(planned(runner, rows)) * several
    finally:
        runner.close()


@pytest.mark.parametrize("name", only(NAMES, "mamba2"))
def test_slots_return_to_a_prefix_and_are_copied_and_saved(folder: Path, name: str, tmp_path: Path) -> None:
    check_slot_journey(model(folder, name), tmp_path / "state", **F32)


def changed(key: str, value: Any, name: str = "mamba2") -> Fixture:
    m = build(name)
    m.keys[key] = value
    return m


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("ssm.inner_size", 100, GGUFError, "inner_size 100 does not fit 8 state space heads in 1 groups"),
        ("ssm.group_count", 3, GGUFError, "8 state space heads in 3 groups"),
        ("ssm.state_size", 40, UnsupportedModel, "states of 40"),
        ("ssm.state_size", 512, UnsupportedModel, "states of 512"),
        ("ssm.conv_kernel", 1, UnsupportedModel, "convolutions of 1"),
        ("ssm.inner_size", 96, UnsupportedModel, "heads of 12"),
        ("expert_count", 4, UnsupportedModel, "expert_count = 4"),
    ],
)
def test_unsupported_sizes_are_refused(
    tmp_path: Path, key: str, value: Any, error: type, message: str
) -> None:
    with (
        GGUF.open(write(changed(key, value), tmp_path / "m.gguf")) as gguf,
        pytest.raises(error, match=message),
    ):
        load_model(gguf)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ssm.state_size", 18, "states of 18"),
        ("ssm.state_size", 260, "states of 260"),
        ("ssm.conv_kernel", 17, "convolutions of 17"),
    ],
)
def test_unsupported_sizes_of_mamba_1_are_refused(tmp_path: Path, key: str, value: int, message: str) -> None:
    with (
        GGUF.open(write(changed(key, value, "mamba"), tmp_path / "m.gguf")) as gguf,
        pytest.raises(UnsupportedModel, match=message),
    ):
        load_model(gguf)


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("wkv.head_size", 50, GGUFError, "192 channels are not a multiple of heads of 50"),
        ("wkv.head_size", 6, UnsupportedModel, "heads of 6"),
        ("wkv.head_size", 192, UnsupportedModel, "heads of 192"),
    ],
)
def test_unsupported_heads_of_rwkv_are_refused(
    tmp_path: Path, key: str, value: int, error: type, message: str
) -> None:
    with (
        GGUF.open(write(changed(key, value, "rwkv7"), tmp_path / "m.gguf")) as gguf,
        pytest.raises(error, match=message),
    ):
        load_model(gguf)
