"""Logits with an expert cache have the bits of logits without, for any number of slots and any
replacement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS, wide
from oracles.fixture import N_CTX, PROMPT, write
from oracles.fixtures import FIXTURES, build
from runners import load_runner

from vkbackend.meta.expert_slots import Move
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.experts.uses import Uses
from vkbackend.models.placement.layout import slot_nbytes_of
from vkbackend.step import Run

ON_HOST = {"override_tensor": (("_exps", "CPU"),)}
N = len(PROMPT)


def opened(path: Path, devices: list[str], slots_mib: float = 0.0, **options: Any) -> Runner:
    options = {"n_ctx": N_CTX, "n_ubatch": N_CTX} | ON_HOST | options
    return load_runner(path, devices=devices, moe_cache_mib=slots_mib, **options)


def slot_mib(runner: Runner) -> float:
    """Return the MiB of a slot of each layer."""
    return slot_nbytes_of(runner.layout.stacks, len(runner.mesh.devices)) / 2**20


def text(runner: Runner) -> np.ndarray:
    """Return the logits of a prompt, then of decoding steps."""
    steps = [runner.step(PROMPT, [Run(0, 0, N, 0)], range(N)).copy()]
    steps += [runner.step([5 + i], [Run(0, 0, 1, N + i)], [0]).copy() for i in range(6)]
    return np.concatenate(steps)


def at_random(rng: np.random.Generator, most: int = 3):  # type: ignore[no-untyped-def]
    """Return a `choose` that copies random experts to random slots, some of several layers at a time."""

    def choose(uses: Uses, resident: Sequence[np.ndarray]) -> list[Move]:
        moves = []
        for layer in rng.permutation(len(resident)).tolist():
            outside = np.setdiff1d(np.arange(len(uses.of_layers[layer])), resident[layer])
            n = min(int(rng.integers(0, most)), len(outside), len(resident[layer]))
            slots = rng.permutation(len(resident[layer]))[:n]
            experts = rng.permutation(outside)[:n]
            moves += [Move(layer, int(s), int(e)) for s, e in zip(slots, experts, strict=True)]
        return moves

    return choose


FAMILIES = [name for name in FIXTURES if any(key.endswith("expert_count") for key in build(name).keys)]
UNEVEN = {"tensor_split": (5, 3, 2)}
THREE = pytest.param(["numpy"] * 3, UNEVEN, id="numpy*3")
SETS: list[Any] = [
    pytest.param(devices, {"tensor_split": (5, 3, 2)[: len(devices)]}, id=",".join(devices), marks=p.marks)
    for p in DEVICE_SETS
    for devices in p.values
]
QUICK = [("qwen3moe", "0,0,0"), ("gpt-oss", "numpy*3")]


def pairs() -> list[Any]:
    """Pair each fixture with three numpy devices and with a set of Vulkan devices in turn."""
    every = []
    for i, name in enumerate(FAMILIES):
        for p in (THREE, SETS[i % len(SETS)]):
            pair = pytest.param(name, *p.values, id=f"{name}-{p.id}", marks=p.marks)
            every.append(pair if (name, p.id) in QUICK else wide(pair))
    return every


@pytest.mark.parametrize(("name", "devices", "options"), pairs())
def test_equal_bits(tmp_path: Path, name: str, devices: list[str], options: dict[str, Any]) -> None:
    """Slots for one expert, for a third and for all, with random experts in each step's slots."""
    path = write(build(name), tmp_path / "model.gguf")
    plain = opened(path, devices, **options)
    want, mib = text(plain), slot_mib(plain)
    n_experts = max(stacks[0].shape[0] for stacks in plain.layout.stacks.values())
    assert plain.expert_cache is None
    plain.close()
    for n_slots in (1, -(-n_experts // 3), n_experts):
        runner = opened(path, devices, n_slots * mib, **options)
        cache = runner.expert_cache
        assert cache and {table.n_slots for table in cache.slots.tables} == {n_slots}
        cache.choose, cache.period = at_random(np.random.default_rng(n_slots)), 1
        got = text(runner)
        runner.close()
        assert np.array_equal(got, want), f"{n_slots} slots"
        assert (cache.misses == 0) == (n_slots == n_experts) and cache.hits
        assert (cache.n_replaced > 0) == (n_slots < n_experts)
