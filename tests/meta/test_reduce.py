"""All-reduce: every provider and depth gives the same bits, bfloat16 keeps its bound, delays change
nothing."""

from __future__ import annotations

import random
import time
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import MULTI, device_infos, nmse
from runners import load_runner

from vkbackend.meta.graph import Graph
from vkbackend.meta.mesh import Mesh
from vkbackend.meta.options import ReduceOptions
from vkbackend.meta.reduce import PROVIDERS, wire_of
from vkbackend.meta.sizing import StepShape
from vkbackend.meta.split import partial
from vkbackend.meta.tensor import Tensor
from vkbackend.models.engine.runner import open_devices
from vkbackend.runtime import Device
from vkbackend.step import Run
from vkbackend.twins.device import NumpyDevice

ROWS, WIDTH = 4, 130


class Sum:
    """A mesh whose step sums partials held in device memory, `length` times in a row, each into a value to
    read."""

    def __init__(self, devices: list[Device], writers: list[int], length: int = 1, **options: Any) -> None:
        self.mesh = Mesh(devices, ReduceOptions(**options), keep_values=True)
        shape = (ROWS, WIDTH)
        self.inputs = [self.mesh.constant(f"partial {i}", np.zeros(shape, np.uint32)) for i in range(length)]

        def build(graph: Graph) -> None:
            for i, weight in enumerate(self.inputs):
                views = [weight.whole(d) if d in writers else None for d in range(len(devices))]
                views = [v and type(v)(v.buffer, v.offset, shape) for v in views]
                with graph.scope(f"sum {i}"):
                    graph.all_reduce(Tensor(graph, ROWS, WIDTH, partial(writers), views))

        self.mesh.prepare(build, StepShape(ROWS, 0, ((0, 0),) * len(devices)))
        self.step = self.mesh.recorded_step(ROWS, 0)

    def put(self, i: int, values: np.ndarray) -> None:
        """values float32 [n_devices, ROWS, WIDTH]"""
        for d, device in enumerate(self.mesh.devices):
            device.write(self.inputs[i].whole(d), values[d].view(np.uint32))

    def run(self) -> list[list[np.ndarray]]:
        """Per sum, what each device got."""
        self.mesh.run(self.step)
        names = [name for name in self.step.values if name.endswith(".h")]
        return [
            [
                device.read(view).view(np.float32).reshape(ROWS, WIDTH)
                for device, view in zip(self.mesh.devices, self.step.values[name], strict=True)
                if view is not None
            ]
            for name in names
        ]


def expected(values: np.ndarray, writers: list[int]) -> np.ndarray:
    total = values[writers[0]].copy()
    for d in writers[1:]:
        total = total + values[d]
    return total


@pytest.mark.parametrize("wire", ["f32", "bf16"])
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    ("n", "writers"), [(2, [0, 1]), (3, [0, 2]), (5, [0, 1, 2, 3, 4]), (8, list(range(8))), (2, [1])]
)
def test_sums_are_exact_in_slot_order(n: int, writers: list[int], provider: str, wire: str) -> None:
    rng = np.random.default_rng(n)
    summed = Sum(
        [NumpyDevice(f"numpy.{d}") for d in range(n)], writers, 3, reduce_provider=provider, reduce_type=wire
    )
    values = rng.uniform(-1, 1, (3, n, ROWS, WIDTH)).astype(np.float32)
    for i in range(3):
        summed.put(i, values[i])
    for i, results in enumerate(summed.run()):
        assert len(results) == n and all(np.array_equal(r, results[0]) for r in results)
        want = expected(values[i], writers)
        if wire == "f32":
            assert np.array_equal(results[0], want)
        else:
            # Below 1 a bfloat16 is at most 2^-9 off (8 bits of significand, to nearest).
            assert np.abs(results[0] - want).max() <= n * 2**-9
            assert not np.array_equal(results[0], want)
    summed.mesh.close()


@pytest.mark.skipif(not device_infos(), reason="no Vulkan device is present")
@pytest.mark.parametrize(
    ("provider", "wire"), [*((provider, "f32") for provider in PROVIDERS), ("pages", "bf16")]
)
@pytest.mark.parametrize("n_runs", [100, pytest.param(1000, marks=pytest.mark.wide)])
def test_bit_equal_over_many_runs_with_delays(
    provider: str, wire: str, n_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of 10 chained reduces, each device held back for a random moment before it may go on."""
    devices = open_devices(["0", "0", "0"])
    summed = Sum(devices, [0, 1, 2], 10, reduce_provider=provider, reduce_type=wire)
    rng, delay = np.random.default_rng(3), random.Random(4)
    values = rng.uniform(-1, 1, (10, 3, ROWS, WIDTH)).astype(np.float32)
    for i in range(10):
        summed.put(i, values[i])
    for device in devices:
        allow = device.queue.allow

        def held_back(number: int, allow: Any = allow) -> None:
            time.sleep(delay.random() * 2e-4)
            allow(number)

        monkeypatch.setattr(device.queue, "allow", held_back)
    exact = [expected(values[i], [0, 1, 2]) for i in range(10)]
    want = exact if wire == "f32" else [results[0] for results in summed.run()]
    assert all(np.abs(w - e).max() <= 3 * 2**-9 for w, e in zip(want, exact, strict=True))
    for _ in range(n_runs):
        for results, right in zip(summed.run(), want, strict=True):
            assert all(np.array_equal(r, right) for r in results)
    summed.mesh.close()


QUICK = {("pages", 0), ("scatter", 1), ("host-sum", 4), *((provider, None) for provider in PROVIDERS)}


@pytest.mark.parametrize("devices", [p for p in MULTI if p.id in ("0,0,0", "0,1")])
@pytest.mark.parametrize(
    ("provider", "ahead"),
    [
        pytest.param(*how, marks=[] if how in QUICK else pytest.mark.wide)
        for how in product(PROVIDERS, (0, 1, 4, None))
    ],
)
def test_whole_model_bits_do_not_depend_on_how(
    models: Path, devices: list[str], provider: str, ahead: int | None
) -> None:
    how: dict[str, Any] = {"reduce_provider": provider, "submit_ahead": ahead}
    want = logits(models, *devices)
    assert np.array_equal(logits(models, *devices, **how), want)
    assert nmse(logits(models, *devices, **how, reduce_type="bf16"), want) <= 1e-4


@cache
def logits(models: Path, *devices: str, **options: Any) -> np.ndarray:
    """Of a prompt, by the devices."""
    tokens = np.random.default_rng(5).integers(3, 512, 12).tolist()
    path = models / "stories-narrow-F32.gguf"
    runner = load_runner(path, devices=devices, n_ctx=32, n_ubatch=16, **options)
    try:
        return runner.step(tokens, [Run(0, 0, 12, 0)], range(12)).copy()
    finally:
        runner.close()


def test_auto_wire_has_the_thresholds_of_the_field() -> None:
    for n, first in ((2, 32_768), (3, 131_072), (4, 262_144), (8, 262_144)):
        assert wire_of("auto", first - 1, n) == "f32" and wire_of("auto", first, n) == "bf16"
