"""A trained llama model produces the same logits as float64 numpy, on any number of devices, in prefill and
single steps, for several sequences."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS, MULTI, covering, nmse, only, product, wide
from llama_float64 import forward
from material import shared_models
from prefills import opened, prefill

from vkbackend.meta.step_kind import StepKind, bucket
from vkbackend.meta.ways import HOST_WRITTEN, PROVIDERS
from vkbackend.runtime import SIGNALS
from vkbackend.step import Run

TYPES = ("F32", "F16", "Q8_0", "Q4_0")
MODELS = [f"stories-narrow-{t}" for t in TYPES]
N_TOKENS = 48
CACHES = [pytest.param("f32", 1e-9, id="f32"), pytest.param("f16", 1e-6, id="f16")]


def tokens_of(seed: int, n: int = N_TOKENS, n_vocab: int = 512) -> list[int]:
    return np.random.default_rng(seed).integers(3, n_vocab, n).tolist()


_single: dict[tuple[str, str], np.ndarray] = {}


def on_one_device(models: Path, name: str, cache: str) -> np.ndarray:
    if (name, cache) not in _single:
        with opened(models / f"{name}.gguf", ["0"], type_k=cache, type_v=cache) as runner:
            _single[name, cache] = prefill(runner, tokens_of(1))
    return _single[name, cache]


# By default, each weight type runs on one set of devices of one driver, because SwiftShader takes seconds to
# compile the shaders of a type.
FLOAT64 = only(
    product([*MODELS, *shared_models(*(f"stories260K-{t}" for t in TYPES))], DEVICE_SETS),
    "stories-narrow-F32-0,0,0",
    "stories-narrow-Q4_0-0",
)


@pytest.mark.parametrize(("name", "devices"), FLOAT64)
def test_equals_float64_numpy(models: Path, name: str, devices: list[str]) -> None:
    tokens = tokens_of(1)
    path = models / f"{name}.gguf"
    with opened(models / f"{name}.gguf", devices) as runner:
        assert nmse(prefill(runner, tokens), forward(path, tokens)) <= 1e-6
    with opened(models / f"{name}.gguf", devices, type_k="f16", type_v="f16") as runner:
        assert nmse(prefill(runner, tokens), forward(path, tokens)) <= 1e-5


@pytest.mark.runtimes(wide=True)
@pytest.mark.parametrize("devices", only([p for p in DEVICE_SETS if p.id in ("0", "0,0,0", "0,1")], "0"))
def test_steps_equal_float64_numpy(models: Path, devices: list[str]) -> None:
    tokens = tokens_of(1, 16)
    want = forward(models / f"{MODELS[0]}.gguf", tokens)
    with opened(models / f"{MODELS[0]}.gguf", devices, n_ubatch=8) as runner:
        assert nmse(prefill(runner, tokens[:8]), want[:8]) <= 1e-6
        for pos in range(8, 16):
            assert nmse(runner.step([tokens[pos]], [Run(0, 0, 1, pos)], [0])[0], want[pos]) <= 1e-6


EQUAL_ONE = only(
    product(MODELS, product(MULTI, CACHES)),
    "stories-narrow-F16-0,0-f16",
    "stories-narrow-Q8_0-0,0,0-f32",
)


@pytest.mark.parametrize(("name", "devices", "cache", "bound"), EQUAL_ONE)
def test_n_devices_equal_one(models: Path, name: str, devices: list[str], cache: str, bound: float) -> None:
    with opened(models / f"{name}.gguf", devices, type_k=cache, type_v=cache) as runner:
        assert nmse(prefill(runner, tokens_of(1)), on_one_device(models, name, cache)) <= bound


@pytest.mark.parametrize("ratio", [wide(pytest.param([3, 1])), wide(pytest.param([1, 0])), [0, 1], [1, 7]])
def test_uneven_and_empty_shares(models: Path, ratio: list[float]) -> None:
    with opened(models / "stories-narrow-Q8_0.gguf", ["0", "0"], tensor_split=ratio) as runner:
        assert (
            nmse(prefill(runner, tokens_of(1)), on_one_device(models, "stories-narrow-Q8_0", "f32")) <= 1e-9
        )


@pytest.mark.parametrize(
    ("devices", "cache", "bound"), only(product(DEVICE_SETS, CACHES), "0,0-f16", "0,0,0-f32")
)
def test_prefill_then_steps_equals_one_prefill(
    models: Path, devices: list[str], cache: str, bound: float
) -> None:
    tokens = tokens_of(2)
    with opened(models / "stories-narrow-Q8_0.gguf", devices, type_k=cache, type_v=cache) as runner:
        whole = prefill(runner, tokens)
        parts = [prefill(runner, tokens[:40])]
        for pos in range(40, N_TOKENS):
            parts.append(runner.step([tokens[pos]], [Run(0, 0, 1, pos)], [0]).copy())
    assert nmse(np.concatenate(parts), whole) <= bound


@pytest.mark.parametrize(("devices", "cache", "bound"), only(product(DEVICE_SETS, CACHES), "0,0,0-f16"))
def test_sequences_of_one_step_equal_single_sequences(
    models: Path, devices: list[str], cache: str, bound: float
) -> None:
    a, b = tokens_of(3, 21), tokens_of(4, 13)
    options: dict[str, Any] = {"n_slots": 4, "type_k": cache, "type_v": cache}
    with opened(models / "stories-narrow-F32.gguf", devices, **options) as runner:
        alone = prefill(runner, a, slot=0), prefill(runner, b, slot=1)
        first = runner.step(a[:20] + b[:5], [Run(3, 0, 20, 0), Run(2, 20, 5, 0)], range(25)).copy()
        second = runner.step(a[20:] + b[5:], [Run(3, 0, 1, 20), Run(2, 1, 8, 5)], range(9)).copy()
    assert nmse(np.concatenate([first[:20], second[:1]]), alone[0]) <= bound
    assert nmse(np.concatenate([first[20:], second[1:]]), alone[1]) <= bound


def test_cells_may_be_in_any_order(models: Path) -> None:
    tokens = tokens_of(5)
    with opened(models / "stories-narrow-F32.gguf", ["0"], n_slots=2) as runner:
        straight = prefill(runner, tokens)
        [cells] = runner.kv.tables.values()
        cells.table[:] = [[3, 0], [1, 2]]
        cells.update()
        assert np.array_equal(prefill(runner, tokens), straight)


@pytest.mark.parametrize(
    ("rows", "devices"),
    covering([5, 1, wide(pytest.param(40, id="40"))], [p for p in DEVICE_SETS if p.id in ("0,0", "0,0,0")]),
)
def test_residual_is_bit_identical_on_devices_of_a_driver(
    models: Path, devices: list[str], rows: int
) -> None:
    with opened(models / "stories-narrow-Q4_0.gguf", devices, keep_values=True) as runner:
        tokens = tokens_of(6, rows)
        prefill(runner, tokens)
        step = runner.mesh.recorded_step(StepKind.of_run(bucket(rows), bucket(rows)))
        residuals = {name: views for name, views in step.values.items() if name.rstrip("'").endswith(".h")}
        assert len(residuals) == 2 * runner.model.n_layer - 1, sorted(step.values)
        for name, views in residuals.items():
            hashes = {
                hashlib.sha256(d.read(v)[: 4 * rows * runner.model.n_embd].tobytes()).hexdigest()
                for d, v in zip(runner.mesh.devices, views, strict=True)
                if v is not None
            }
            assert len(hashes) == 1, f"{name} differs between devices"


GROUPS = [
    pytest.param(["0", "0"], 0, id="0,0"),
    *(
        pytest.param((["0", "1"] * n)[:n], ahead, id=f"{n} devices")
        for n, ahead in ((2, None), (3, 0), (4, 1), (5, 2), (8, None))
    ),
]


def prompt_and_tokens(models: Path, devices: tuple[str, ...], **how: Any) -> np.ndarray:
    how |= {"tensor_split": (1,) * len(devices)}
    with opened(models / "stories-narrow-F32.gguf", list(devices), **how) as runner:
        logits = [prefill(runner, tokens_of(7, 9))]
        logits += [prefill(runner, tokens_of(8 + i, 1), first=9 + i) for i in range(3)]
        return np.concatenate(logits)


@cache
def with_pages(models: Path, devices: tuple[str, ...]) -> np.ndarray:
    return prompt_and_tokens(models, devices, reduce_provider="pages", reduce_signal="semaphore")


# tests/meta/test_signals.py combines all providers with all signals that they allow.
WAYS = [
    *(pytest.param(provider, "semaphore", id=provider) for provider in PROVIDERS if provider != "pages"),
    pytest.param("pages", "flag", id="flag"),
    *(pytest.param(p, s, id=f"{p}-{s}") for p in HOST_WRITTEN for s in SIGNALS if "event" in s),
]


@pytest.mark.parametrize(
    ("provider", "signal", "devices", "ahead"), only(product(WAYS, GROUPS), "host-sum-0,0", "flag-0,0")
)
def test_every_way_gives_the_same_bits(
    models: Path, provider: str, signal: str, devices: list[str], ahead: int | None
) -> None:
    how = {"reduce_provider": provider, "reduce_signal": signal, "submit_ahead": ahead}
    logits = prompt_and_tokens(models, tuple(devices), **how)
    assert np.array_equal(logits, with_pages(models, tuple(devices)))


@pytest.mark.parametrize(
    ("provider", "devices", "ahead"),
    only(product(["visible", "host-sum"], GROUPS), "visible-0,0"),
)
def test_steps_in_one_call_give_the_same_bits(
    models: Path, provider: str, devices: list[str], ahead: int | None
) -> None:
    how = {"reduce_provider": provider, "reduce_signal": "flag", "submit_ahead": "one-call"}
    logits = prompt_and_tokens(models, tuple(devices), **how)
    assert np.array_equal(logits, with_pages(models, tuple(devices)))


OPTIONAL = ["timeline", "host_import", "device_map", "timeline,host_import,device_map"]


@pytest.mark.parametrize(
    ("disabled", "devices"),
    only(
        product(OPTIONAL, [p for p in DEVICE_SETS if p.id in ("0", "0,0", "0,1")]),
        "timeline,host_import,device_map-0,0",
    ),
)
def test_without_optional_features(
    models: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str], disabled: str
) -> None:
    tokens = tokens_of(8, 9)
    with opened(models / "stories-narrow-Q8_0.gguf", devices) as runner:
        want = prefill(runner, tokens)
    monkeypatch.setenv("VKBACKEND_DISABLE", disabled)
    with opened(models / "stories-narrow-Q8_0.gguf", devices) as runner:
        assert np.array_equal(prefill(runner, tokens), want)


@pytest.mark.parametrize("devices", only([p for p in DEVICE_SETS if p.id in ("0", "0,1")], "0"))
def test_portable_floor(models: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str]) -> None:
    monkeypatch.setenv("VKBACKEND_FLOOR", "1")
    tokens = tokens_of(9, 20)
    with opened(models / "stories-narrow-F32.gguf", devices) as runner:
        want = forward(models / "stories-narrow-F32.gguf", tokens)
        assert nmse(prefill(runner, tokens), want) <= 1e-6


@pytest.mark.parametrize("devices", [p for p in DEVICE_SETS if p.id == "0"])
def test_ops_that_gpus_choose(models: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str]) -> None:
    monkeypatch.setenv("VKBACKEND_AS_GPU", "1")
    tokens = tokens_of(9, 20)
    with opened(models / "stories-narrow-Q8_0.gguf", devices) as runner:
        assert not runner.mesh.devices[0].limits.is_cpu
        want = forward(models / "stories-narrow-Q8_0.gguf", tokens)
        assert nmse(prefill(runner, tokens), want) <= 1e-6


@pytest.mark.parametrize("devices", only([p for p in DEVICE_SETS if p.id in ("0,0", "0,1")], "0,0"))
def test_poisoned_memory_is_never_read(
    models: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str]
) -> None:
    monkeypatch.setenv("VKBACKEND_POISON", "1")
    with opened(models / "stories-narrow-Q8_0.gguf", devices) as runner:
        assert (
            nmse(prefill(runner, tokens_of(1)), on_one_device(models, "stories-narrow-Q8_0", "f32")) <= 1e-9
        )
