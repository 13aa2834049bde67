"""Runs of mixtures with and without an expert cache, for tests that compare their bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from device_sets import all_wide_but, device_set, of_each_size, product
from oracles.fixture import N_CTX, PROMPT
from oracles.fixtures import FIXTURES, is_mixture
from runners import load_runner

from vkbackend import hazards
from vkbackend.meta.expert_moves import Move
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.experts.uses import Uses
from vkbackend.models.placement.layout import slot_nbytes_of
from vkbackend.runtime import Device
from vkbackend.step import Run

ON_HOST = {"override_tensor": (("_exps", "CPU"),)}
N = len(PROMPT)
FAMILIES = [name for name in FIXTURES if is_mixture(name)]
SHARES = 5, 3, 2


def opened(path: Path, devices: list[str], mib: float = 0.0, **options: Any) -> Runner:
    options = {"n_ctx": N_CTX, "n_ubatch": N_CTX, "moe_cache_mib": mib} | ON_HOST | options
    return load_runner(path, devices=devices, **options)


def slot_mib(runner: Runner) -> float:
    return slot_nbytes_of(runner.layout.stacks, len(runner.mesh.devices)) / 2**20


def text(runner: Runner) -> np.ndarray:
    steps = [runner.step(PROMPT, [Run(0, 0, N, 0)], range(N)).copy()]
    steps += [runner.step([5 + i], [Run(0, 0, 1, N + i)], [0]).copy() for i in range(6)]
    return np.concatenate(steps)


def at_random(rng: np.random.Generator, most: int = 3):  # type: ignore[no-untyped-def]
    """Return a function `choose` that copies random experts to random slots, sometimes in several layers at
    once."""

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


def on_devices(*quick: tuple[str, str]) -> list[Any]:
    """Pair every mixture with sets of one, two and three devices. All pairs are wide, except `quick`."""
    pairs = [pair for name, devices in quick for pair in product([name], [device_set(devices)])]
    return all_wide_but(pairs, of_each_size(FAMILIES))


class Slow:
    """Makes a device's copies end only after several polls."""

    def __init__(self, device: Device, rng: np.random.Generator) -> None:
        self._ended, self._rng, self._n = device.copies_ended, rng, 0
        device.copies_ended = self.ended  # type: ignore[method-assign]

    def ended(self) -> bool:
        self._n = self._n - 1 if self._n else int(self._rng.integers(0, 4))
        return self._n == 0 and self._ended()


TEXT_EVERY = 20


def run_at_random(path: Path, devices: list[str], n_steps: int, **options: Any) -> None:
    """Compute the same tokens again and again, while random experts are copied to random slots. Targets of
    copies are NaN until the first poll. No step may read them."""
    plain = opened(path, devices, **options)
    want, mib = text(plain), slot_mib(plain)
    plain.close()
    rng = np.random.default_rng(n_steps)
    runner = opened(path, devices, 3 * mib, **options)
    cache = runner.expert_cache
    assert cache
    cache.choose, cache.period = at_random(rng), 1
    slow = [Slow(device, rng) for device in runner.mesh.devices]
    created, n_during = 0, 0
    for i in range(n_steps):
        at = int(rng.integers(0, 6))
        got = runner.step([5 + at], [Run(0, 0, 1, N + at)], [0]) if i % TEXT_EVERY else text(runner)
        assert np.array_equal(got, want[N + at : N + at + 1] if i % TEXT_EVERY else want), f"step {i}"
        assert cache.slots.faults() == []
        n_during += cache.slots.n_moving > 0
        if i % 50 == 0:
            check_recordings(runner)
        if i == 10:
            created = sum(device.created for device in runner.mesh.devices)
    assert created in (0, sum(device.created for device in runner.mesh.devices))
    assert n_during > n_steps // 4 and cache.n_replaced > n_steps // 4 and slow
    runner.close()


def check_recordings(runner: Runner) -> None:
    """The copies conflict only with reads of slots by table, and with no other access of a recorded step.
    Without this exception, the check reports these reads."""
    cache = runner.expert_cache
    assert cache
    n_found = 0
    for step in runner.mesh.steps.by_kind.values():
        for d, executable in enumerate(step.executables):
            copies, views = cache.slots.copies(d), cache.slots.views(d)
            assert hazards.check_copies(executable.recording, copies, views) == []
            n_found += len(hazards.check_copies(executable.recording, copies))
    assert n_found or not cache.slots.n_moving
