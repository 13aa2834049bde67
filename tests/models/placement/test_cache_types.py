"""KV caches of every type, on any number of devices, produce logits within the type's rounding error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS, nmse, only
from oracles.fixture import write
from oracles.fixtures import build
from runners import load_runner
from safetensors.numpy import load_file
from tiny_models import Tiny, write_tiny

from vkbackend import twins
from vkbackend.formats import dequantize, quantize, row_nbytes
from vkbackend.models.engine.cache.blocks import SlotContent
from vkbackend.models.engine.runner import saved_state
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.ops import CACHE_TYPES
from vkbackend.step import Run

# With an odd number of kv heads, two blocks of the cache share a 32-bit word.
TINY = Tiny("llama", n_layer=2, n_head=6, n_head_kv=3, head_dim=32)
TOKENS = np.random.default_rng(3).integers(0, TINY.n_vocab, 44).tolist()
# These bounds on the NMSE against an f32 cache are the squared rounding step of each type at unit variance.
BOUNDS = {"f32": 1e-12, "f16": 1e-6, "bf16": 1e-4, "q8_0": 1e-3}
BOUNDS |= dict.fromkeys(("q5_0", "q5_1"), 5e-3) | dict.fromkeys(("q4_0", "q4_1", "iq4_nl"), 1e-1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("types") / "tiny.gguf", TINY)


@contextmanager
def opened(path: Path, devices: list[str], type_k: str, type_v: str, **options: Any) -> Iterator[Runner]:
    runner = load_runner(
        path, devices=devices, n_ctx=64, n_ubatch=64, type_k=type_k, type_v=type_v, **options
    )
    try:
        yield runner
    finally:
        runner.close()


def logits(runner: Runner, first: int = 0, slot: int = 0) -> np.ndarray:
    rows = []
    if first < 40:
        rows.append(
            runner.step(TOKENS[first:40], [Run(slot, 0, 40 - first, first)], range(40 - first)).copy()
        )
    for at in range(max(first, 40), 44):
        rows.append(runner.step(TOKENS[at : at + 1], [Run(slot, 0, 1, at)], [0]).copy())
    return np.concatenate(rows)


_exact: list[np.ndarray] = []


def exact(path: Path) -> np.ndarray:
    if not _exact:
        with opened(path, ["numpy"], "f32", "f32") as runner:
            _exact.append(logits(runner))
    return _exact[0]


OTHERS = ("bf16", "q8_0"), ("q5_0", "q5_1"), ("iq4_nl", "q4_1")
QUICK = ("f32", "f16"), ("q5_0", "q8_0"), ("q4_0", "iq4_nl")
PAIRS = [
    pytest.param(k, v, marks=[] if (k, v) in QUICK else [pytest.mark.wide])
    for k in CACHE_TYPES
    for v in CACHE_TYPES
]


@pytest.mark.parametrize(("type_k", "type_v"), PAIRS)
def test_caches_differ_only_by_rounding(path: Path, type_k: str, type_v: str) -> None:
    with (
        opened(path, ["numpy"], type_k, type_v) as single,
        opened(path, ["numpy"] * 3, type_k, type_v) as three,
    ):
        got = logits(single)
        assert nmse(got, exact(path)) <= BOUNDS[type_k] + BOUNDS[type_v]
        coarser = max(BOUNDS[type_k], BOUNDS[type_v])
        if coarser > BOUNDS["q8_0"]:
            assert nmse(got, exact(path)) > coarser / 200, "these types round more than that"
        assert nmse(logits(three), got) <= max(1e-9, (BOUNDS[type_k] + BOUNDS[type_v]) / 10)


@pytest.mark.parametrize("devices", only([p for p in DEVICE_SETS if p.id in ("0,0", "0,1")], "0,0"))
@pytest.mark.parametrize(
    "types",
    [
        ("q8_0", "q4_0"),
        *(pytest.param((k, v), marks=pytest.mark.wide) for k, v in (*OTHERS, ("q4_1", "q5_0"))),
    ],
)
def test_caches_on_vulkan(path: Path, devices: list[str], types: tuple[str, str]) -> None:
    with opened(path, devices, *types) as runner:
        assert nmse(logits(runner), exact(path)) <= sum(BOUNDS[t] for t in types)


@pytest.mark.parametrize(
    "types", [("q8_0", "q4_0"), *(pytest.param(types, marks=pytest.mark.wide) for types in OTHERS)]
)
def test_states_keep_every_bit(path: Path, tmp_path: Path, types: tuple[str, str]) -> None:
    with opened(path, ["numpy"] * 2, *types) as runner:
        want = logits(runner)[40:]
        saved_state.save(runner, tmp_path / "a", 0, SlotContent(TOKENS, 44), 0, 40)
    kinds = {name: (np.uint8, row_nbytes(name, 32)) for name in CACHE_TYPES[3:]} | {"bf16": (np.uint16, 32)}
    stored = load_file(tmp_path / "a")
    for name, dtype in (("k", types[0]), ("v", types[1])):
        kind, width = kinds[dtype]
        array = stored[f"cache_{name}_l1"]
        assert (array.dtype, array.shape) == (kind, (40, 3, width))
    with opened(path, ["numpy"] * 2, *types, n_slots=2) as runner:
        saved_state.load(runner, tmp_path / "a", 1, SlotContent())
        assert np.array_equal(logits(runner, 40, slot=1), want)


@pytest.mark.parametrize("types", [("q8_0", "q5_1"), pytest.param(("q4_0", "f16"), marks=pytest.mark.wide)])
def test_heads_are_filled_to_whole_blocks(tmp_path: Path, types: tuple[str, str]) -> None:
    """Heads of 40 values need two blocks. Saved states keep every bit on other devices."""
    path = write_tiny(tmp_path / "tiny.gguf", Tiny("llama", n_layer=1, n_head=6, n_head_kv=3, head_dim=40))
    with opened(path, ["numpy"], "f32", "f32") as runner:
        want = logits(runner)
    with opened(path, ["numpy"] * 3, *types) as runner:
        assert [width for _, width, _ in runner.kv.plans[0].arrays] == [64, 40 if types[1] == "f16" else 64]
        three = logits(runner)
        assert nmse(three, want) <= sum(BOUNDS[t] for t in types)
        saved_state.save(runner, tmp_path / "a", 0, SlotContent(TOKENS, 44), 0, 40)
    with opened(path, ["numpy"], *types) as runner:
        saved_state.load(runner, tmp_path / "a", 0, SlotContent())
        assert nmse(logits(runner, 40), three[40:]) <= 1e-9


@pytest.mark.wide
@pytest.mark.parametrize("head_dim", [8, 72, 80])
@pytest.mark.parametrize("devices", only([p for p in DEVICE_SETS if p.id in ("0,0", "0,1")], "0,0"))
def test_filled_heads_on_vulkan(tmp_path: Path, devices: list[str], head_dim: int) -> None:
    tiny = Tiny("llama", n_layer=2, n_head=6, n_head_kv=3, head_dim=head_dim)
    path = write_tiny(tmp_path / "tiny.gguf", tiny)
    with opened(path, ["numpy"], "q8_0", "q5_0") as runner:
        want = logits(runner)
    with opened(path, devices, "q8_0", "q5_0") as runner:
        assert nmse(logits(runner), want) <= 1e-4


@pytest.mark.wide
@pytest.mark.parametrize(
    "name", ["deepseek2", "deepseek2+heads", "deepseek32", "gemma4+shared", "olmo2", "gpt-oss"]
)
def test_architectures_with_quantized_caches(tmp_path: Path, name: str) -> None:
    """The models have latent attention, an indexer, shared caches, wide norms and sinks. In some rows,
    rounding changes the choice of an expert or position, as with bf16."""
    path = write(build(name), tmp_path / "model.gguf")
    with opened(path, ["numpy"], "f32", "f32") as runner:
        want = logits(runner)
    for n in (1, 2):
        with opened(path, ["numpy"] * n, "q8_0", "q8_0") as runner:
            errors = [nmse(row, exact_row) for row, exact_row in zip(logits(runner), want, strict=True)]
            assert np.median(errors) <= 2e-2


def test_rotation_reduces_the_error_of_large_channels() -> None:
    """Keys of trained models have channels that are 20 times larger than the others. These channels determine
    the block's scale, and so the error of the other channels. The rotation makes the scale smaller."""
    keys = np.random.default_rng(1).standard_normal((64, 1, 32))
    keys[..., 5] *= 20
    errors = []
    for turns in (False, True):
        given, back = keys.copy(), np.empty_like(keys)
        if turns:
            twins.attention.hadamard(keys, given, head=32, head_out=32, n_heads=64)
        rounded = dequantize(
            quantize(given.reshape(64, 32).astype(np.float32), "q4_0").reshape(-1), "q4_0", (64, 32)
        )
        if turns:
            twins.attention.hadamard(rounded, back, head=32, head_out=32, n_heads=64)
        errors.append(nmse(back if turns else rounded.reshape(keys.shape), keys))
    assert errors[1] < errors[0] / 2
