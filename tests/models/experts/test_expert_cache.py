"""With and without an expert cache, logits have the same bits, for any number of slots and any
replacement."""

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
from device_sets import DEVICE_SETS, all_wide_but, device_set, in_turn, needs_layer, product, wide
from expert_caches import (
    FAMILIES,
    ON_HOST,
    SHARES,
    N,
    at_random,
    on_devices,
    opened,
    run_at_random,
    slot_mib,
    text,
)
from oracles.fixture import PROMPT, write
from oracles.fixtures import build

from vkbackend import hazards
from vkbackend.buffer import Home
from vkbackend.meta.expert_moves import Move
from vkbackend.models.engine.cache.blocks import SlotContent
from vkbackend.models.engine.runner import saved_state
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.experts import expert_cache
from vkbackend.models.placement.memory_report import allocations
from vkbackend.models.placement.traced_steps import step_sizes
from vkbackend.step import Run
from vkbackend.tools.measure.twin_nodes import twin_runner


@pytest.mark.parametrize(("name", "devices"), on_devices(("qwen3moe", "0,0")))
def test_equal_bits(tmp_path: Path, name: str, devices: list[str]) -> None:
    """The cache has no slots, or slots for one expert, for a third, or for all. Each step's slots hold random
    experts."""
    options = {"tensor_split": SHARES[: len(devices)]}
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
        for step in runner.mesh.steps.by_kind.values():
            for executable in step.executables:
                assert all(found.kind == "in-place" for found in hazards.check(executable.recording))
        runner.close()
        assert np.array_equal(got, want), f"{n_slots} slots"
        assert (cache.misses == 0) == (n_slots == n_experts) and cache.hits
        assert (cache.n_replaced > 0) == (n_slots < n_experts)


LONG = [
    pytest.param(
        *p.values,
        10_000 if p.id == "0" else 1_000,
        id=p.id,
        marks=[*p.marks, pytest.mark.wide, pytest.mark.timeout(1800)],
    )
    for p in DEVICE_SETS
]


@pytest.mark.parametrize(("devices", "n_steps"), [pytest.param(["numpy"], 21, id="numpy"), *LONG])
def test_no_step_reads_an_expert_that_is_replaced(
    tmp_path: Path, devices: list[str], n_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VKBACKEND_POISON", "1")
    path = write(build("qwen3vlmoe"), tmp_path / "model.gguf")
    run_at_random(path, devices, n_steps, tensor_split=SHARES[: len(devices)])


def test_a_table_that_names_a_slot_too_early_is_noticed(tmp_path: Path) -> None:
    path = write(build("qwen3vlmoe"), tmp_path / "model.gguf")
    plain = opened(path, ["numpy"])
    want, mib = text(plain), slot_mib(plain)
    plain.close()
    runner = opened(path, ["numpy"], 3 * mib)
    cache = runner.expert_cache
    assert cache and cache.slots.faults() == []
    slots, move = cache.slots, Move(0, 0, 7)
    slots.begin([move])
    slots._set(move.layer, move.expert, move.slot)
    assert len(slots.faults()) == 1
    assert not np.array_equal(text(runner), want)
    runner.close()


def test_counts_warm_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start begins with the experts that the first run used most. A damaged file is ignored."""
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path / "cache"))
    path = write(build("qwen3vlmoe"), tmp_path / "model.gguf")
    plain = opened(path, ["numpy"])
    mib = slot_mib(plain)
    plain.close()
    used: list[list[np.ndarray]] = []
    for start in range(3):
        runner = opened(path, ["numpy"] * (1 + start % 2), 3 * mib)
        cache = runner.expert_cache
        assert cache and cache.warm == (start == 1)
        if cache.warm:
            most = [np.argsort(-held.round(2), kind="stable")[:3] for held in used[0]]
            assert all(np.array_equal(*pair) for pair in zip(cache.slots.resident, most, strict=True))
        cache.choose = lambda uses, resident: []
        text(runner)
        runner.close()
        used.append([held.copy() for held in cache.uses.of_layers])
        assert sum(held.sum() for held in used[start]) > 0
        [file] = (tmp_path / "cache").glob("experts-*.json")
        if start:
            file.write_bytes(file.read_bytes()[:-40])


KILLED = """
import sys, threading, time
from multiprocessing import Pipe
from vkbackend.models.engine.engine_process import serve
from vkbackend.models.engine.messages import Generate
from vkbackend.models.experts import expert_cache
from vkbackend.models.options import Options
from vkbackend.models.sampling.params import SamplingParams
expert_cache.SAVE_S = 0.5
here, there = Pipe()
def ask():
    here.recv()
    while True:
        print(here.recv(), flush=True)
threading.Thread(target=ask, daemon=True).start()
here.send(Generate(1, tuple(range(3, 20)), 4, SamplingParams(temperature=0.0)))
serve(there, Options.of(sys.argv[1], devices=["numpy"], n_ctx=64, override_tensor=[("_exps", "CPU")],
    moe_cache_mib=float(sys.argv[2])))
"""


@pytest.mark.wide
def test_a_killed_server_keeps_the_counts(tmp_path: Path) -> None:
    """An idle engine process stores the counts. The test kills it as soon as the file exists."""
    path, cache = write(build("qwen3vlmoe"), tmp_path / "model.gguf"), tmp_path / "cache"
    words = [sys.executable, "-c", KILLED, str(path), "1"]
    server = subprocess.Popen(words, env=os.environ | {"VKBACKEND_CACHE": str(cache)})
    deadline = time.monotonic() + 60
    while not list(cache.glob("experts-*.json")):
        assert server.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    server.kill()
    server.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VKBACKEND_CACHE", str(cache))
        runner = opened(path, ["numpy"], 1.0)
        assert runner.expert_cache and runner.expert_cache.warm
        runner.close()


def test_counts_are_due_after_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    runner = opened(write(build("qwen3vlmoe"), tmp_path / "model.gguf"), ["numpy"], 1.0)
    assert runner.save_due_s() is None
    runner.step(PROMPT, [Run(0, 0, N, 0)], [N - 1])
    assert 0 < (runner.save_due_s() or 0) <= expert_cache.SAVE_S
    monkeypatch.setattr(expert_cache, "SAVE_S", 0.0)
    assert runner.save_due_s() == 0
    runner.save_counts()
    assert runner.save_due_s() is None and list(tmp_path.glob("experts-*.json"))
    runner.close()


def test_sizes(tmp_path: Path) -> None:
    path = write(build("qwen3vlmoe"), tmp_path / "model.gguf")
    runner = opened(path, ["numpy"] * 2, moe_cache_mib="auto")
    assert {table.n_slots for table in runner.layout.tables.values()} == {8}
    assert any("8 of 8 experts per layer are cached" in note for note in runner.notes)
    stats = runner.expert_stats()
    assert stats == {"n_expert_hits": 0, "n_expert_misses": 0, "n_experts_replaced": 0}
    text(runner)
    assert runner.expert_stats()["n_expert_hits"] == 2 * 3 * (N + 6)  # 2 of 8 experts in 3 layers
    runner.close()
    runner = opened(path, ["numpy"], 1e-6)
    assert runner.expert_cache is None and any("an expert of each layer takes" in n for n in runner.notes)
    runner.close()
    runner = opened(path, ["numpy"], 8.0, override_tensor=())
    assert runner.expert_cache is None and any("has no effect" in note for note in runner.notes)
    runner.close()


def n_looked_up(runner: Runner) -> int:
    stats = runner.expert_stats()
    return stats["n_expert_hits"] + stats["n_expert_misses"]


def of_two_slots(runner: Runner) -> np.ndarray:
    tokens = [3 + 7 * i % 90 for i in range(83)]
    out = [runner.step(tokens[:80], [Run(0, 0, 50, 0), Run(1, 50, 30, 0)], [49, 79]).copy()]
    out += [runner.step([tokens[80 + i]], [Run(0, 0, 1, 50 + i)], [0]).copy() for i in range(3)]
    return np.concatenate(out)


@pytest.mark.parametrize("name", [n if n == "qwen3vlmoe" else wide(pytest.param(n, id=n)) for n in FAMILIES])
def test_halves_and_hosts(tmp_path: Path, name: str) -> None:
    """A step in two halves counts the experts of both halves. Every node has its own cache."""
    path = write(build(name), tmp_path / "model.gguf")
    options: dict[str, Any] = {"n_ctx": 192, "n_slots": 2, "n_ubatch": 128, "reduce_type": "f32"}
    with_halves = options | {"interleave": True}
    plain = opened(path, ["numpy"] * 2, **with_halves)
    want, mib = of_two_slots(plain), slot_mib(plain)
    plain.close()
    halved = opened(path, ["numpy"] * 2, 3 * mib, **with_halves)
    assert np.array_equal(of_two_slots(halved), want)
    n_pairs = halved.model.n_used * len(halved.layout.tables) * 83
    assert n_looked_up(halved) == n_pairs
    halved.close()
    cached = options | ON_HOST | {"moe_cache_mib": 3 * mib}
    with twin_runner(path, ["0/numpy", "1/numpy"], 2, True, **cached) as runner:
        assert np.array_equal(of_two_slots(runner), want)
        assert n_looked_up(runner) == n_pairs


@pytest.mark.parametrize(
    ("name", "devices"),
    all_wide_but(
        product(["qwen3vlmoe"], [device_set("numpy*1")]),
        in_turn(FAMILIES, [*map(device_set, ("numpy*1", "numpy*2", "numpy*3", "0"))]),
    ),
)
def test_a_state_saved_with_a_cache_is_loaded_without(tmp_path: Path, name: str, devices: list[str]) -> None:
    path, saved = write(build(name), tmp_path / "model.gguf"), tmp_path / "state.safetensors"
    options = {"tensor_split": SHARES[: len(devices)]}
    plain = opened(path, devices, **options)
    want, mib = text(plain), slot_mib(plain)
    plain.close()
    n_slots = 3
    for mib_of_next in (0.0, n_slots * mib):
        runner = opened(path, devices, n_slots * mib - mib_of_next, **options)
        runner.step(PROMPT, [Run(0, 0, N, 0)], [N - 1])
        saved_state.save(runner, saved, 0, SlotContent(PROMPT, N), 0, N)
        runner.close()
        runner = opened(path, devices, mib_of_next, **options)
        if runner.expert_cache:
            runner.expert_cache.choose, runner.expert_cache.period = at_random(np.random.default_rng(0)), 1
        saved_state.load(runner, saved, 0, SlotContent([], 0))
        for i in range(6):
            got = runner.step([5 + i], [Run(0, 0, 1, N + i)], [0])
            assert np.array_equal(got, want[N + i : N + i + 1]), f"token {i}"
        runner.close()


def test_the_report_counts_slots_exactly(tmp_path: Path) -> None:
    path = write(build("qwen3vlmoe"), tmp_path / "model.gguf")
    plain = opened(path, ["numpy"] * 2, tensor_split=SHARES[:2])
    mib = slot_mib(plain)
    plain.close()
    runner = opened(path, ["numpy"] * 2, 3 * mib, tensor_split=SHARES[:2])
    shape, devices = runner._shape, runner.mesh.devices
    limits = [device.limits for device in devices]
    steps = step_sizes(runner.model, runner.layout, runner.options, limits, shape)
    for held, device in zip(allocations(runner.layout, devices, steps), devices, strict=True):
        assert held.items["slots"] > 0
        for home in (Home.WEIGHTS, Home.HOST, Home.KV, Home.SCRATCH):
            assert held.homes[home.value] == device.nbytes[home], home
    runner.close()


VALIDATED = """
import json, sys
from vkbackend.meta.expert_moves import Move
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.options import Options
from vkbackend.step import Run
from vkbackend.vulkan import instance
devices, mib, prompt = sys.argv[2].split(","), float(sys.argv[3]), [3 + i for i in range(20)]
experts = [("_exps", "CPU")]
runner = Runner(Options.of(
    sys.argv[1], devices=devices, n_ctx=64, override_tensor=experts, moe_cache_mib=mib,
    tensor_split=[1] * len(devices),
))
if sys.argv[4] == "semaphores":
    for device in runner.mesh.devices:
        device.copies_ended(), device.copies.close()
        device.copies, device.transfer_family = None, device.family
cache = runner.expert_cache
turns = iter(range(1000))
def choose(uses, resident):
    turn = next(turns)
    outside = [[e for e in range(8) if e not in slots] for slots in resident]
    return [Move(layer, turn % 3, experts[turn % 5]) for layer, experts in enumerate(outside)]
cache.choose = choose
cache.period = 1
runner.step(prompt, [Run(0, 0, 20, 0)], [19])
for step in range(20):
    runner.step([5], [Run(0, 0, 1, 20 + step)], [0])
assert cache.n_replaced > 20, cache.n_replaced
runner.close()
print(json.dumps(instance.validation_messages))
"""


@pytest.mark.wide
@needs_layer
@pytest.mark.parametrize("order", ["barriers", "semaphores"])
@pytest.mark.parametrize("devices", [p for p in DEVICE_SETS if p.id in ("0", "0,1")])
def test_replacements_cause_no_messages(tmp_path: Path, devices: list[str], order: str) -> None:
    """Synchronization validation checks the copies of every step, on the compute queue or on a transfer
    queue."""
    path = write(build("qwen3vlmoe"), tmp_path / "model.gguf")
    plain = opened(path, devices)
    mib = slot_mib(plain)
    plain.close()
    done = subprocess.run(
        [sys.executable, "-c", VALIDATED, str(path), ",".join(devices), str(3 * mib), order],
        env=os.environ | {"VKBACKEND_VALIDATION": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
