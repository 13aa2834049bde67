"""Test slots for experts of layers that stay in the model file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS, in_turn, needs_layer, wide
from expert_caches import (
    FAMILIES,
    SHARES,
    N,
    Slow,
    at_random,
    on_devices,
    opened,
    run_at_random,
    slot_mib,
    text,
)
from oracles.fixture import N_CTX, PROMPT, write
from oracles.fixtures import build
from streamed import PLACES, check_windows, poisoned, stream_of

from vkbackend import hazards
from vkbackend.buffer import Home
from vkbackend.meta.staged_experts import N_STAGED
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.placement.layout import weight_nbytes
from vkbackend.models.placement.memory_report import allocations
from vkbackend.models.placement.traced_steps import step_sizes
from vkbackend.step import Run
from vkbackend.tools.measure.twin_nodes import twin_runner


def streamed(path: Path, devices: list[str], place: str, mib: float = 0.0, **options: Any) -> Runner:
    shares = {"tensor_split": SHARES[: len(devices)], "use_mmap": False}
    where = {"override_tensor": ()} | PLACES[place]
    return opened(path, devices, mib, pinned_mib=0.0, **shares | where | options)


def cases() -> list[Any]:
    """Pair every mixture with sets of one, two and three devices. Consecutive cases alternate between the two
    placements of weights."""
    every = []
    for i, p in enumerate(on_devices(("qwen3moe", "numpy*2"))):
        name, devices = p.values
        every.append(pytest.param(name, list(PLACES)[i // 4 % 2], devices, id=p.id, marks=p.marks))
    return every


@pytest.mark.parametrize(("name", "place", "devices"), cases())
def test_equal_bits(
    tmp_path: Path, name: str, place: str, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are slots for one expert, for a third, or for all. Each step's slots hold random experts. If all
    experts have slots, steps copy no experts."""
    path = write(build(name), tmp_path / "model.gguf")
    plain = streamed(path, devices, place)
    if plain.encodes:
        plain.close()
        pytest.skip("encoders pin all weights")
    if not plain.layout.stacks:  # the layer in the file has no experts
        plain.close()
        place = "experts"
        plain = streamed(path, devices, place)
    want, mib = text(plain), slot_mib(plain)
    stacks = {load.name for loads in plain.layout.stacks.values() for load in loads}
    n_experts = max(loads[0].shape[0] for loads in plain.layout.stacks.values())
    others = [load for load in plain.layout.loads if load.home is Home.STREAM and load.name not in stacks]
    plain.close()
    poisoned(monkeypatch)
    for n_slots in (1, -(-n_experts // 3), n_experts):
        runner = streamed(path, devices, place, n_slots * mib)
        cache, stream = runner.expert_cache, stream_of(runner)
        assert cache and {table.n_slots for table in cache.slots.tables} == {n_slots}
        assert runner.mesh.stores.staged
        cache.choose, cache.period = at_random(np.random.default_rng(n_slots)), 1
        slow = [Slow(device, np.random.default_rng(n_slots)) for device in runner.mesh.devices]
        n_texts, deadline = 0, time.monotonic() + 60
        # The thread that reads experts from the file may begin late.
        while n_texts < 2 or (n_slots < n_experts and not cache.n_replaced and time.monotonic() < deadline):
            assert np.array_equal(text(runner), want), f"{n_slots} slots, text {n_texts}"
            n_texts += 1
        assert check_windows(runner) and slow
        for step in runner.mesh.steps.by_kind.values():
            for d, executable in enumerate(step.executables):
                copies, views = cache.slots.copies(d), cache.slots.views(d)
                assert hazards.check_copies(executable.recording, copies, views) == []
        runner.close()
        assert (cache.n_replaced > 0) == (n_slots < n_experts)
        if n_slots == n_experts and not any(len(load.shape) == 3 for load in others):
            whole = sum(weight_nbytes(load, d) for load in others for d in range(len(devices)))
            assert stream.n_copied == n_texts * (1 + 6) * whole


@pytest.mark.wide
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("devices", "n_steps"),
    [
        pytest.param(["numpy"] * 2, 2_000, id="numpy*2"),
        *(pytest.param(*p.values, 1_000, id=p.id, marks=p.marks) for p in DEVICE_SETS[:1]),
    ],
)
def test_no_step_reads_an_expert_that_is_replaced(
    tmp_path: Path, devices: list[str], n_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VKBACKEND_POISON", "1")
    poisoned(monkeypatch)
    path = write(build("qwen3vlmoe"), tmp_path / "model.gguf")
    options = {"tensor_split": SHARES[: len(devices)], "pinned_mib": 0.0, "use_mmap": False}
    run_at_random(path, devices, n_steps, **options)


def test_a_token_copies_the_experts_that_miss(tmp_path: Path) -> None:
    path = write(build("qwen3moe"), tmp_path / "model.gguf")
    runner = streamed(path, ["numpy"] * 2, "layers", 3 * slot_mib_of(path))
    cache, stream = runner.expert_cache, stream_of(runner)
    assert cache
    cache.choose = lambda uses, resident: []
    runner.step(PROMPT, [Run(0, 0, N, 0)], [N - 1])
    cache.stats()
    n_missed, n_copied = cache.misses, stream.n_copied
    for i in range(6):
        runner.step([5 + i], [Run(0, 0, 1, N + i)], [0])
    cache.stats()
    loads = [load for load in runner.layout.loads if load.home is Home.STREAM]
    nbytes = {load.name: sum(weight_nbytes(load, d) for d in range(2)) for load in loads}
    [of_expert] = {
        sum(nbytes[load.name] // load.shape[0] for load in stacks) for stacks in runner.layout.stacks.values()
    }
    others = sum(nbytes[load.name] for load in loads if len(load.shape) < 3)
    assert cache.hits and cache.misses > n_missed
    assert stream.n_copied - n_copied == 6 * others + (cache.misses - n_missed) * of_expert
    runner.close()


HOSTS = ["0/numpy", "1/numpy", "1/numpy"]
WAYS = [
    pytest.param("tensor", 0, id="tensor"),
    pytest.param("hosts", 3, id="hosts-slots"),
    pytest.param("hosts", 0, id="hosts"),
    pytest.param("tensor", 3, id="tensor-slots"),
]


@pytest.mark.parametrize(
    ("name", "split_mode", "n_slots"),
    [*map(wide, in_turn(FAMILIES, WAYS, 2))],
)
def test_several_hosts(tmp_path: Path, name: str, split_mode: str, n_slots: int) -> None:
    """Each node copies its devices' slices of the layers that stay in the file."""
    path = write(build(name), tmp_path / "model.gguf")
    options: dict[str, Any] = {"n_ctx": N_CTX, "n_ubatch": N_CTX, "split_mode": split_mode} | PLACES["layers"]
    with twin_runner(path, HOSTS, **options) as plain:
        assert not plain.layout.streamed
        if plain.encodes:
            pytest.skip("encoders pin all weights")
        want, mib = text(plain), slot_mib(plain)
    more = {"pinned_mib": 0.0, "moe_cache_mib": n_slots * mib}
    with twin_runner(path, HOSTS, **options, **more) as runner:
        has_experts = any(
            load.name.endswith("_exps.weight") for load in runner.layout.loads if load.home is Home.STREAM
        )
        assert runner.layout.streamed and (runner.expert_cache is not None) == (n_slots > 0 and has_experts)
        assert np.array_equal(text(runner), want)


def slot_mib_of(path: Path) -> float:
    plain = streamed(path, ["numpy"] * 2, "layers")
    mib = slot_mib(plain)
    plain.close()
    return mib


def test_the_report_counts_staged_experts_exactly(tmp_path: Path) -> None:
    path = write(build("qwen3moe"), tmp_path / "model.gguf")
    mib = slot_mib_of(path)
    runner = streamed(path, ["numpy"] * 2, "layers", 3 * mib)
    devices, layout = runner.mesh.devices, runner.layout
    limits = [device.limits for device in devices]
    steps = step_sizes(runner.model, layout, runner.options, limits, runner._shape)
    staged = runner.mesh.stores.staged
    assert staged and layout.streamed
    for d, held in enumerate(allocations(layout, devices, steps)):
        buffer = staged._buffers[d]
        assert buffer and held.homes["stream"] > buffer.nbytes >= N_STAGED
        for home in (Home.WEIGHTS, Home.HOST, Home.STREAM, Home.KV, Home.SCRATCH):
            assert held.homes[home.value] == devices[d].nbytes[home], home
    runner.close()


VALIDATED = """
import json, sys
from vkbackend.meta.expert_moves import Move
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.options import Options
from vkbackend.step import Run
from vkbackend.vulkan import instance
devices, mib, order = sys.argv[2].split(","), float(sys.argv[3]), sys.argv[4]
runner = Runner(Options.of(
    sys.argv[1], devices=devices, n_ctx=64, n_gpu_layers=2, pinned_mib=0.0, use_mmap=False, moe_cache_mib=mib,
    tensor_split=[1] * len(devices),
))
for device in runner.mesh.devices:
    if order == "semaphores" and device.copies:
        device.copies_ended(), device.copies.close()
        device.copies, device.transfer_family = None, device.family
assert len(runner.layout.streamed) >= 2, runner.layout.streamed
if cache := runner.expert_cache:
    turns = iter(range(1000))
    def choose(uses, resident):
        turn = next(turns)
        outside = [[e for e in range(8) if e not in slots] for slots in resident]
        return [Move(layer, turn % 3, experts[turn % 5]) for layer, experts in enumerate(outside)]
    cache.choose, cache.period = choose, 1
runner.step([3 + i for i in range(20)], [Run(0, 0, 20, 0)], [19])
for step in range(20):
    runner.step([5], [Run(0, 0, 1, 20 + step)], [0])
assert not cache or cache.n_replaced > 5, cache.n_replaced
runner.close()
print(json.dumps(instance.validation_messages))
"""


@pytest.mark.wide
@needs_layer
@pytest.mark.parametrize("order", ["no slots", "barriers", "semaphores"])
@pytest.mark.parametrize("devices", [p for p in DEVICE_SETS if p.id in ("0", "0,1")])
def test_streams_cause_no_messages(tmp_path: Path, devices: list[str], order: str) -> None:
    """Synchronization validation checks steps whose weights the host copies from the file. These steps run
    without slots, and with replacements on the compute queue or on a transfer queue. Memory is NaN before its
    first use."""
    path = write(build("qwen3moe"), tmp_path / "model.gguf")
    mib = 0.0 if order == "no slots" else 3 * slot_mib_of(path)
    done = subprocess.run(
        [sys.executable, "-c", VALIDATED, str(path), ",".join(devices), str(mib), order],
        env=os.environ | {"VKBACKEND_VALIDATION": "1", "VKBACKEND_POISON": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
