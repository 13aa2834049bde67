"""Logits have the same bits whether weights stay in the file or are pinned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import all_wide_but, device_set, of_each_size, product
from oracles.fixture import N_CTX, PROMPT, write
from oracles.fixtures import FIXTURES, build, is_mixture
from runners import load_runner
from streamed import PLACES, check_windows, poisoned, stream_of

from vkbackend.buffer import Home
from vkbackend.meta import streams
from vkbackend.meta.known_ways import ONE_CALL
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.placement.layout import host_nbytes, weight_nbytes
from vkbackend.models.placement.memory_report import allocations
from vkbackend.models.placement.traced_steps import step_sizes
from vkbackend.step import Run

N = len(PROMPT)
N_DECODED = 2


def opened(path: Path, devices: list[str], pinned_mib: Any = "auto", **options: Any) -> Runner:
    sizes = {"n_ctx": N_CTX, "n_ubatch": N_CTX, "tensor_split": (5, 3, 2)[: len(devices)], "use_mmap": False}
    return load_runner(path, devices=devices, pinned_mib=pinned_mib, **sizes | options)


def text(runner: Runner) -> np.ndarray:
    steps = [runner.step(PROMPT, [Run(0, 0, N, 0)], range(N)).copy()]
    steps += [runner.step([5 + i], [Run(0, 0, 1, N + i)], [0]).copy() for i in range(N_DECODED)]
    return np.concatenate(steps)


def read_by_token(runner: Runner) -> tuple[int, int]:
    """Return the least and the largest number of bytes of streamed weights that a step of one row reads. The
    experts that a row uses may share an adjugate expert (GroveMoE)."""
    least = most = 0
    for name, weight in runner.mesh.weights.items():
        if weight.streamed:
            [load] = [load for load in runner.layout.loads if load.name == name]
            size = sum(weight_nbytes(load, d) for d in range(len(runner.mesh.devices)))
            n_experts = weight.shape[0] if len(weight.shape) == 3 else 0
            most += size * runner.model.n_used // n_experts if n_experts else size
            n_used = 1 if "_chexps" in name else runner.model.n_used
            least += size * n_used // n_experts if n_experts else size
    return least, most


PLACED = [
    pytest.param(name, place, id=f"{name}-{place}")
    for name in FIXTURES
    for place in (PLACES if is_mixture(name) else ["layers"])
]
QUICK = [
    *product(["qwen3moe"], product(["experts"], [device_set("0")])),
    *product(["qwen3"], product(["layers"], [device_set("numpy*2")])),
]


@pytest.mark.parametrize(("name", "place", "devices"), all_wide_but(QUICK, of_each_size(PLACED)))
def test_equal_bits(
    tmp_path: Path, name: str, place: str, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget allows no pinned layer, or only one. After the first text, nothing is allocated or recorded,
    and each token copies only the bytes that it reads."""
    path, options = write(build(name), tmp_path / "model.gguf"), PLACES[place]
    plain = opened(path, devices, **options)
    if plain.encodes:
        plain.close()
        pytest.skip("encoders pin all weights")
    want, nbytes = text(plain), host_nbytes(plain.layout)
    first = next(iter(nbytes.values()))
    plain.close()
    for pinned, n_pinned in ((0.0, 0), (first / 2**20, 1)):
        if n_pinned == len(nbytes):  # a model with one layer in host memory
            continue
        runner = opened(path, devices, pinned, **options)
        assert len(runner.layout.streamed) == len(nbytes) - n_pinned
        with monkeypatch.context() as patch:
            poisoned(patch)
            assert np.array_equal(text(runner), want)
            created, n_recorded = sum(d.created for d in runner.mesh.devices), runner.n_recorded
            before = stream_of(runner).n_copied
            assert np.array_equal(text(runner), want)
            assert sum(d.created for d in runner.mesh.devices) == created
            assert runner.n_recorded == n_recorded
        whole = sum(n for il, n in nbytes.items() if il in runner.layout.streamed)
        copied = stream_of(runner).n_copied - before
        least, most = read_by_token(runner)
        assert N_DECODED * least <= copied - whole <= N_DECODED * most
        assert check_windows(runner)
        runner.close()


def test_one_call_submits_no_step_that_reads_copied_weights(tmp_path: Path) -> None:
    path = write(build("qwen3"), tmp_path / "model.gguf")
    how = {"reduce_provider": "visible", "submit_ahead": ONE_CALL}
    texts = []
    for pinned in (0.0, "auto"):
        runner = opened(path, ["numpy"] * 2, pinned, **PLACES["layers"], **how)
        texts.append(text(runner))
        steps = runner.mesh.steps.by_kind.values()
        assert len(steps) == 2 and all(step.in_one_call == (pinned == "auto") for step in steps)
        runner.close()
    assert np.array_equal(*texts)


def test_the_report_counts_regions_exactly(tmp_path: Path) -> None:
    path = write(build("qwen3moe"), tmp_path / "model.gguf")
    runner = opened(path, ["numpy"] * 2, 0.0, **PLACES["layers"])
    devices, layout = runner.mesh.devices, runner.layout
    limits = [device.limits for device in devices]
    steps = step_sizes(runner.model, layout, runner.options, limits, runner._shape)
    for d, held in enumerate(allocations(layout, devices, steps)):
        for home in (Home.WEIGHTS, Home.HOST, Home.STREAM, Home.KV, Home.SCRATCH):
            assert held.homes[home.value] == devices[d].nbytes[home], home
        # two layers of three
        largest = max(host_nbytes(layout).values())
        assert 0 < held.homes["stream"] <= 2 * largest + 4096
    assert any("3 layers" in note and "stay in the file" in note for note in runner.notes)
    runner.close()


def test_steps_of_many_pairs_copy_all_experts_ahead() -> None:
    assert [n for n in (1, 2, 3, 4, 5) if streams.uses_all(n, 2, 8)] == [4, 5]
