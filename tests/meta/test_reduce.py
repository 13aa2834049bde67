"""All all-reduce providers produce the same bits, for any delays and any number of segments that are
submitted ahead. The errors of bfloat16 are bounded.
"""

from __future__ import annotations

import random
import time
from functools import cache
from itertools import product, starmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import MULTI, covering, device_infos, nmse, some, wide
from device_sets import product as pairs
from hypothesis import given
from hypothesis import strategies as st
from runners import load_runner
from summing import ROWS, WIDTH, Sum, expected

from vkbackend.meta.reduce import wire_of
from vkbackend.meta.sizing import StepShape, measure
from vkbackend.meta.ways import PROVIDERS
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.step import Run
from vkbackend.twins.arrays import put_f16, take_f16
from vkbackend.twins.device import NumpyDevice
from vkbackend.wire import wire_words

# Rounding changes a number below 1 by at most half of the last bit's value. bf16 has 8 significant bits, and
# f16 has 11.
OFF = {"f32": 0.0, "bf16": 2**-9, "f16": 2**-12}


@pytest.mark.parametrize("wire", OFF)
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
            assert np.abs(results[0] - want).max() <= n * OFF[wire]
            assert not np.array_equal(results[0], want)
    summed.mesh.close()


WIRES = [*((provider, "f32") for provider in PROVIDERS), ("pages", "bf16"), ("scatter", "f16")]


@pytest.mark.skipif(not device_infos(), reason="no Vulkan device is present")
@pytest.mark.parametrize(
    ("provider", "wire"),
    some(starmap(pytest.param, WIRES), 2),
)
@pytest.mark.parametrize("n_runs", [25, pytest.param(1000, marks=pytest.mark.wide)])
def test_bit_equal_over_many_runs_with_delays(
    provider: str, wire: str, n_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert all(np.abs(w - e).max() <= 3 * OFF[wire] for w, e in zip(want, exact, strict=True))
    for _ in range(n_runs):
        for results, right in zip(summed.run(), want, strict=True):
            assert all(np.array_equal(r, right) for r in results)
    summed.mesh.close()


def awkward(rng: np.random.Generator, n: int, elements: int) -> np.ndarray:
    """Return one array per device, with values of very different magnitudes. Some elements are zero,
    subnormal, infinite or NaN. The magnitude of all other elements is at least 2^-80, because drivers may set
    subnormal sums to zero."""
    sizes = np.exp2(rng.uniform(-80, 120, (n, -(-elements // 50))).repeat(50, axis=1)[:, :elements])
    values = (rng.standard_normal((n, elements)) * sizes).astype(np.float32)
    values[np.abs(values) < 2.0**-80] = 0
    rare = np.array([0, -0.0, 1e-45, -1e-39, np.inf, -np.inf, np.nan, 3.4028235e38], np.float32)
    at = rng.random(values.shape) < 0.03
    values[at] = rng.choice(rare, at.sum())
    if elements > 300:
        values[0, 128:256] = 0
    return values


def sent_over_wire(share: np.ndarray) -> np.ndarray:
    words, got = np.zeros(wire_words("f16", share.size), np.uint32), np.empty_like(share)
    put_f16(share, words)
    take_f16(words, got)
    return got


@pytest.mark.parametrize(
    ("provider", "names"),
    covering(
        PROVIDERS,
        [pytest.param(["numpy"] * 3, id="numpy"), *(p for p in MULTI if p.id in ("0,0,0", "0,1"))],
    ),
)
def test_every_device_gets_the_same_bits_over_the_f16_wire(names: list[str], provider: str) -> None:
    rng = np.random.default_rng(len(names))
    for shape in ((1, 1), (1, 127), (3, 43), (2, 64), (5, 77), (1, 1000)):
        how = {"reduce_provider": provider, "reduce_type": "f16"}
        summed = Sum(open_devices(names), list(range(len(names))), shape=shape, **how)
        values = awkward(rng, len(names), shape[0] * shape[1])
        summed.put(0, values)
        with np.errstate(over="ignore", invalid="ignore"):
            ((*results,),) = summed.run()
            want = expected(np.stack([sent_over_wire(share) for share in values]), list(range(len(names))))
        for got in results:
            # assert_array_equal also compares the positions of NaN
            np.testing.assert_array_equal(got.reshape(-1), want)
        summed.mesh.close()  # later shapes reuse the devices


@pytest.mark.no_vulkan
@given(st.integers(0, 2**32 - 1), st.integers(1, 700))
def test_precision_of_the_f16_wire(seed: int, n: int) -> None:
    """The f16 format of exchanges rounds each number above 2^-29 of the block's largest number to 11 bits,
    and preserves infinities and NaN. The mean squared error is u^2 / 12, where u is the value of the last
    bit."""
    rng = np.random.default_rng(seed)
    (share,) = awkward(rng, 1, n)
    with np.errstate(invalid="ignore"):
        got = sent_over_wire(share)
        finite = np.isfinite(share)
        assert np.array_equal(got[~finite], share[~finite], equal_nan=True)
        for at in range(0, n, 128):
            block = slice(at, at + 128)
            x, y = share[block][finite[block]].astype(np.float64), got[block][finite[block]]
            # numbers that round up to 2^128 become infinite
            doubled = np.abs(x) >= 2.0**128 * (1 - 2.0**-12)
            assert np.isinf(y[doubled]).all()
            x, y = x[~doubled], y[~doubled]
            top = np.abs(share[block][finite[block]]).max(initial=0)
            assert (np.abs(y - x) <= np.maximum(np.abs(x) * 2.0**-11, max(top * 2.0**-29, 2.0**-126))).all()
            assert not ((y != 0) & (np.abs(y) < 2.0**-126)).any()
    plain = rng.standard_normal(1 << 14).astype(np.float32)
    assert nmse(sent_over_wire(plain), plain.astype(np.float64)) <= 2.0**-20 / 12


@pytest.mark.no_vulkan
def test_slots_hold_the_scales_too() -> None:
    """A slot also holds F32 sums, so it has four bytes per element. Only the f16 message of a single element
    needs more."""
    assert [wire_words("f16", n) for n in (0, 1, 2, 127, 128, 129, 256)] == [0, 2, 2, 65, 65, 67, 130]
    assert all(wire_words("f16", n) <= n for n in range(2, 1000))
    for shape, slot in (((1, 1), 8), ((1, 2), 8), ((3, 43), 516)):
        devices = [NumpyDevice(f"numpy.{d}") for d in range(2)]
        summed = Sum(devices, [0, 1], shape=shape, reduce_type="f16", reduce_provider="host-sum")
        build, step = summed.mesh.steps.builder.build, StepShape(shape[0], 0, ((0, 0),) * 2)
        assert measure(devices, build, step, "f16").slot == slot
        summed.mesh.close()


TWO_SETS = [p for p in MULTI if p.id in ("0,0,0", "0,1")]
QUICK = [("pages", 0), ("scatter", 1), ("host-sum", 4), *((provider, None) for provider in PROVIDERS)]
SLOW = [how for how in product(PROVIDERS, (0, 1, 4, None)) if how not in QUICK]


def ids(hows: list[tuple[str, int | None]]) -> list[Any]:
    return [pytest.param(*how, id=f"{how[0]}-{how[1]}") for how in hows]


@pytest.mark.parametrize(
    ("provider", "ahead", "devices"),
    [
        *(p if p.values[2] == ["0", "0", "0"] else wide(p) for p in covering(ids(QUICK), TWO_SETS)),
        *map(wide, pairs(ids(SLOW), TWO_SETS)),
    ],
)
def test_logits_do_not_depend_on_provider_or_depth(
    models: Path, devices: list[str], provider: str, ahead: int | None
) -> None:
    how: dict[str, Any] = {"reduce_provider": provider, "submit_ahead": ahead}
    want = logits(models, *devices)
    assert np.array_equal(logits(models, *devices, **how), want)
    if ahead is not None:
        return  # Test bf16 and f16 once per provider.
    # Rounding to 11 bits has 1/64 of the squared error of rounding to 8 bits.
    assert nmse(logits(models, *devices, **how, reduce_type="bf16"), want) <= 1e-4
    assert nmse(logits(models, *devices, **how, reduce_type="f16"), want) <= 1e-4 / 64


@cache
def logits(models: Path, *devices: str, **options: Any) -> np.ndarray:
    tokens = np.random.default_rng(5).integers(3, 512, 12).tolist()
    path = models / "stories-narrow-F32.gguf"
    runner = load_runner(path, devices=devices, n_ctx=32, n_ubatch=16, **options)
    try:
        return runner.step(tokens, [Run(0, 0, 12, 0)], range(12)).copy()
    finally:
        runner.close()


def test_auto_wire_has_the_thresholds_of_llama_cpp() -> None:
    for n, first in ((2, 32_768), (3, 131_072), (4, 262_144), (8, 262_144)):
        assert wire_of("auto", first - 1, n) == "f32" and wire_of("auto", first, n) == "f16"
        assert wire_of("auto", first, n, software=True) == "f32"
