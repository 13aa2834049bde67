"""Threads of one process act as several nodes. A single node computes the expected logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import covering, wide
from groups import FOUR, HOSTS, OPTIONS, THREE, TOKENS, TWO, here, logits_of_two_slots
from oracles import encoders
from oracles.fixture import write
from oracles.fixtures import build
from runners import load_runner, step_hidden
from tiny_models import Tiny, write_tiny

from vkbackend.meta import ways
from vkbackend.models.hosts.group import Group
from vkbackend.models.options import Options
from vkbackend.step import Run
from vkbackend.tools.measure.twin_nodes import twin_runner

pytestmark = pytest.mark.no_vulkan


def check(path: Path, places: list[str], interleave: bool = False, **options: Any) -> None:
    """Check that several nodes produce the same logits as a single node. If `interleave` is true, a step
    computes its rows in two halves."""
    options = OPTIONS | options
    # a split by layers depends on nodes, so this single node pretends to be several
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Options, "nodes", tuple(place[0] for place in places))
        single = load_runner(path, devices=here(places), interleave=interleave, **options)
    want = logits_of_two_slots(single)
    single.close()
    n_hosts = 1 + max(int(place[0]) for place in places)
    with twin_runner(path, places, n_hosts, interleave, **options) as runner:
        assert np.array_equal(logits_of_two_slots(runner), want) and np.isfinite(want).all()


@pytest.mark.parametrize(
    ("name", "places", "options"),
    [
        pytest.param("llama", TWO, {}, marks=pytest.mark.wide),
        ("llama", THREE, {"tensor_split": [1, 5, 2], "reduce_provider": "host-sum"}),
        wide(pytest.param("llama", ["1/numpy", "0/numpy", "2/numpy"], {"tensor_split": [3, 0, 2]})),
        pytest.param("llama", TWO, {"interleave": True}, marks=pytest.mark.wide),
        pytest.param("llama", TWO, {"reduce_type": "bf16"}, marks=pytest.mark.wide),
        wide(pytest.param("llama", THREE, {"reduce_type": "f16", "reduce_provider": "scatter"})),
        pytest.param("llama", [*TWO, "2/numpy"], {"split_mode": "layer"}, marks=pytest.mark.wide),
        pytest.param("qwen3moe", THREE, {}, marks=pytest.mark.wide),
        wide(pytest.param("qwen3moe", TWO, {"split_mode": "layer", "reduce_provider": "host-sum"})),
        pytest.param("qwen35", TWO, {}, marks=pytest.mark.wide),
        ("llama", FOUR, {"split_mode": "hosts", "tensor_split": [1, 2, 3, 1]}),
        wide(pytest.param("qwen3moe", THREE, {"split_mode": "hosts", "reduce_provider": "host-sum"})),
        pytest.param("qwen35", [*FOUR, "2/numpy"], {"split_mode": "hosts"}, marks=pytest.mark.wide),
        pytest.param("gpt-oss", [*THREE, "0/numpy"], {"reduce_provider": "scatter"}, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_logits_equal_one_host(tmp_path: Path, name: str, places: list[str], options: Any) -> None:
    check(write(build(name), tmp_path / "model.gguf"), places, **options)


@pytest.mark.parametrize(
    ("places", "options"),
    [
        wide(pytest.param(FOUR, {})),
        wide(pytest.param(FOUR, {"reduce_provider": "host-sum", "reduce_type": "bf16"})),
        (HOSTS, {"reduce_provider": "host-sum", "tensor_split": [1, 3, 2], "interleave": True}),
        wide(pytest.param([*THREE, "2/numpy"], {"reduce_provider": "host-sum", "reduce_type": "f16"})),
        wide(pytest.param(FOUR, {"split_mode": "hosts", "reduce_provider": "scatter"})),
    ],
    ids=str,
)
def test_large_sums_are_scattered_over_hosts(
    tmp_path: Path, places: list[str], options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "SCATTER_NBYTES", 1 << 12)
    check(write_tiny(tmp_path / "model.gguf", Tiny("llama", n_layer=2)), places, **options)


@pytest.mark.parametrize(
    ("name", "places"),
    covering(
        ["llama", "nomic-bert-moe"],
        [pytest.param(p, id=str(p)) for p in (TWO, ["1/numpy", "0/numpy", "1/numpy"])],
    ),
)
def test_hidden_states(tmp_path: Path, name: str, places: list[str]) -> None:
    fixture = build(name) if name == "llama" else encoders.build(name)
    path = write(fixture, tmp_path / "model.gguf")
    rows = TOKENS[:13], [Run(0, 0, 9, 0), Run(1, 9, 4, 0)], [0, 4, 8, 12]
    single = load_runner(path, devices=here(places), interleave=False, **OPTIONS)
    want = step_hidden(single, *rows)
    single.close()
    with twin_runner(path, places, 2, False, **OPTIONS) as runner:
        assert np.array_equal(step_hidden(runner, *rows), want) and np.isfinite(want).all()


def test_rows_of_cos_and_sin_of_host_0_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hashes of the nodes' tables differ, so node 0 sends its rows of cos and sin."""
    path = write(build("llama"), tmp_path / "model.gguf")
    with monkeypatch.context() as patch:
        from vkbackend.models.hosts import joining

        numbers = iter(range(100))
        patch.setattr(joining, "tables_hash", lambda *_: str(next(numbers)))
        sent: list[Any] = []
        real = Group.step
        patch.setattr(Group, "step", lambda self, *args: (sent.append(args[-1]), real(self, *args))[1])
        check(path, TWO, interleave=True)
    assert sent and all(tables is not None for tables in sent)
