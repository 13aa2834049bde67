"""Every architecture produces the golden logits, on which transformers and llama.cpp agree.

`oracles/fixtures.py` creates the models from a seed, and `oracles/make_golden.py` computes the logits. `-m
oracle` runs transformers and llama.cpp again if they are installed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from device_sets import DEVICE_SETS, in_turn, nmse, only, product
from exchanges import planned
from oracles.fixture import (
    N_CTX,
    N_PREFILL,
    N_STEERED,
    PROMPT,
    Q8_0,
    quantized,
    write,
    write_steering,
)
from oracles.fixtures import FIXTURES, build
from places import GOLDEN
from prefills import opened, prefill

from vkbackend.meta.step_kind import StepKind, bucket
from vkbackend.models.architectures.registry import ARCHITECTURES
from vkbackend.models.engine.cache.blocks import SlotContent
from vkbackend.models.engine.runner import saved_state
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.step import Run

EXACT = 1e-5  # Bound on the NMSE against the oracles. Lavapipe reaches an NMSE of 5e-13 to 2e-11.
TWINS = 1e-9  # Bound for numpy devices. The oracles differ by at most 4e-11, or 1e-6 with GELU.
SAME = 1e-9  # Bound on the NMSE between results of different numbers of devices with one driver.
DRIVERS = 1e-6  # Bound on the NMSE between results of devices with different drivers.
N = len(PROMPT)

single, three = (next(p for p in DEVICE_SETS if p.id == devices) for devices in ("0", "0,0,0"))
architectures = pytest.mark.parametrize("name", FIXTURES)
OPTIONS: dict[str, Any] = {"n_ctx": N_CTX, "n_ubatch": N_CTX, "reduce_type": "f32"}
WAYS = ("at once", "in steps")
AT_ONCE = ("at once", pytest.param("in steps", marks=pytest.mark.wide))
_made: dict[tuple[str, ...], Result] = {}


@dataclass(frozen=True)
class Result:
    logits: np.ndarray  # [n_tokens, n_vocab]
    exchanges: dict[int, int]
    planned: int


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("architectures")


def model(folder: Path, name: str) -> Path:
    path = folder / f"{name}.gguf"
    return path if path.exists() else write(build(name), path)


def golden(name: str) -> np.ndarray:
    return np.load(GOLDEN / f"{name}.npz")["logits"]


def stepped(runner: Runner) -> np.ndarray:
    ends = [*range(runner.n_ubatch, N_PREFILL, runner.n_ubatch), *range(N_PREFILL, N + 1)]
    rows = []
    for pos, end in zip([0, *ends], ends, strict=False):
        n = end - pos
        rows.append(runner.step(PROMPT[pos:end], [Run(0, 0, n, pos)], range(n)).copy())
    return np.concatenate(rows)


def run(folder: Path, name: str, devices: list[str], way: str, **options: Any) -> Result:
    """Return the result for the prompt. If the prompt runs in steps, a window of 12 uses a ring of 27 cells
    more than once."""
    key = (name, *devices, way, repr(options))
    if key not in _made:
        n_ubatch = N_CTX if way == "at once" else 16
        with opened(model(folder, name), devices, **OPTIONS | dict(n_ubatch=n_ubatch, **options)) as runner:
            logits = prefill(runner, PROMPT) if way == "at once" else stepped(runner)
            exchanges, n_planned = dict[int, int](), 0
            if len(devices) > 1:
                n_planned = len(planned(runner, 1))
                prompt_rows = bucket(min(N, n_ubatch))
                for rows in (prompt_rows,) if way == "at once" else (1, prompt_rows):
                    reduces = runner.mesh.recorded_step(StepKind.of_run(rows, rows)).reduces
                    exchanges[rows] = sum(not r.gather for r in reduces)
            _made[key] = Result(logits, exchanges, n_planned)
    return _made[key]


def check_golden(folder: Path, name: str, devices: list[str], way: str, **options: Any) -> None:
    """Check the logits and the number of exchanges per layer. A layer has two exchanges. A layer that lacks
    attention or FFN, or adds their results together, has one exchange. Norms over split heads add an exchange
    of a few values per row."""
    result = run(folder, name, devices, way, **options)
    assert nmse(result.logits, golden(name)) <= (TWINS if devices[0] == "numpy" else EXACT)
    if len(devices) > 1 and "split_mode" not in options:
        assert set(result.exchanges.values()) == {result.planned}, result


def check_one(folder: Path, name: str, devices: list[str], way: str, bound: float = SAME) -> None:
    single, several = (run(folder, name, chosen, way).logits for chosen in (devices[:1], devices))
    assert nmse(several, single) <= bound


# ---- against the oracles ----


# By default, Vulkan devices run models whose ops differ. These models have sparse and latent caches, windows,
# soft-caps, sinks, biases, sparse gates, experts, or one of four kinds of recurrent layers.
ON_THREE = (
    *(f"{name}-0,0,0-in steps" for name in (
        "llama", "glm-dsa", "qwen35moe", "mamba2")),
    "gemma2-0,0,0-at once",
)  # fmt: skip
ON_ONE = (
    *(f"{name}-0-in steps" for name in ("gpt-oss", "lfm2")),
    *(f"{name}-0-at once" for name in ("gemma3n", "kimi-linear")),
)
ON_VULKAN = only(product(FIXTURES, product([three, single], WAYS)), *ON_THREE, *ON_ONE)
# Other models run on three numpy devices, some of them in test_gemma3n.py, test_indexed.py and
# test_state_space.py. Variants that add little run only with --all.
ELSEWHERE = {"gemma3n", "deepseek32", "glm-dsa+shared", "granitehybrid", "falcon-h1"}
ELSEWHERE |= {
    "gptneox+serial",
    "bitnet+relu2",
    "bailingmoe3+limits",
    "bailingmoe3+sections",
    "laguna+elements",
    "mpt",
    "refact",
}
PLAIN = {name for name in FIXTURES if "+" not in name}  # other fixtures are variants of an architecture
ON_NUMPY = only(FIXTURES, *(PLAIN - {id_.split("-0,")[0] for id_ in ON_THREE} - ELSEWHERE))
# Each model has a different kind of cache or state. A cache is full, windowed, chunked, shared, or sparse and
# latent. There are four recurrent states, and a model whose layers have both a state and a cache.
MEMORIES = "gemma2 llama4+chunks gemma4+shared deepseek32 qwen3next kimi-linear lfm2 falcon-h1".split()


@pytest.mark.parametrize(("name", "devices", "way"), ON_VULKAN)
def test_oracles_on_vulkan(folder: Path, name: str, devices: list[str], way: str) -> None:
    check_golden(folder, name, devices, way)


@pytest.mark.parametrize("name", ON_NUMPY)
@pytest.mark.parametrize("way", AT_ONCE)
def test_oracles_on_numpy(folder: Path, name: str, way: str) -> None:
    check_golden(folder, name, ["numpy"] * 3, way)


@pytest.mark.parametrize("name", only(FIXTURES, "llama", "gemma4", "cohere2moe+rms", "mamba2"))
@pytest.mark.parametrize("n", [1, pytest.param(3, marks=pytest.mark.wide)])
def test_control_vectors(folder: Path, name: str, n: int) -> None:
    path = write_steering(build(name), folder / f"{name}-steering.gguf")
    with opened(
        model(folder, name), ["numpy"] * n, **OPTIONS | dict(control_vectors=[(str(path), 1.0)])
    ) as runner:
        assert nmse(prefill(runner, PROMPT)[-N_STEERED:], np.load(GOLDEN / f"{name}.npz")["steered"]) <= EXACT


# ---- several devices ----


@pytest.mark.parametrize(
    ("name", "devices"),
    only(product(FIXTURES, [three]), *(f"{name}-0,0,0" for name in ("llama",))),
)
def test_three_devices_equal_one(folder: Path, name: str, devices: list[str]) -> None:
    check_one(folder, name, devices, "in steps")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "devices", "n", "way"),
    in_turn(FIXTURES, product([pytest.param(["numpy"], id="numpy"), single], product([2, 3, 4], WAYS)), 5),
)
def test_devices_equal_one(folder: Path, name: str, devices: list[str], n: int, way: str) -> None:
    check_one(folder, name, devices * n, way)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "devices", "way"),
    in_turn(FIXTURES, product([p for p in DEVICE_SETS if p.id in ("0,1", "1,0")], WAYS)),
)
def test_two_drivers_equal_one(folder: Path, name: str, devices: list[str], way: str) -> None:
    check_one(folder, name, devices, way, DRIVERS)


@pytest.mark.wide
@architectures
@pytest.mark.parametrize("devices", [p for p in DEVICE_SETS if p.id == "0,1"])
def test_two_drivers_choose_the_same_experts(folder: Path, name: str, devices: list[str]) -> None:
    with opened(model(folder, name), devices, **OPTIONS | dict(keep_values=True)) as runner:
        prefill(runner, PROMPT)
        rows = bucket(N)
        chosen = {
            k: v
            for k, v in runner.mesh.recorded_step(StepKind.of_run(rows, rows)).values.items()
            if k.endswith("moe_ids")
        }
        if not runner.model.n_used:
            pytest.skip("no experts")
        layers = runner.model.config.layers  # type: ignore[attr-defined]
        assert len(chosen) == sum(layer.mixture is not None for layer in layers)
        for label, views in chosen.items():
            first, second = (
                device.read(view).view(np.uint32).reshape(view.shape)[:N]
                for device, view in zip(runner.mesh.devices, views, strict=True)
                if view is not None
            )
            assert np.array_equal(first, second), label


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name in FIXTURES if name.startswith(("deepseek32", "glm-dsa"))])
@pytest.mark.parametrize("devices", [p for p in DEVICE_SETS if p.id == "0,1"])
def test_two_drivers_choose_the_same_positions(folder: Path, name: str, devices: list[str]) -> None:
    top_k = build(name).keys["attention.indexer.top_k"]
    with opened(model(folder, name), devices, **OPTIONS | dict(keep_values=True)) as runner:
        prefill(runner, PROMPT)
        values = runner.mesh.recorded_step(StepKind.of_run(bucket(N), bucket(N))).values
        chosen = {k: v for k, v in values.items() if k.endswith("chosen")}
        assert len(chosen) == sum(len(plan.arrays) == 3 for plan in runner.layout.caches)
        for label, views in chosen.items():
            first, second = (
                device.read(view).view(np.uint32).reshape(view.shape)[:N]
                for device, view in zip(runner.mesh.devices, views, strict=True)
                if view is not None
            )
            for row in range(N):
                n = min(row + 1, top_k)
                assert np.array_equal(first[row, :n], second[row, :n]), (label, row)


@pytest.mark.wide
@pytest.mark.parametrize(("name", "way"), in_turn(FIXTURES, WAYS))
def test_layers_on_different_devices(folder: Path, name: str, way: str) -> None:
    check_golden(folder, name, ["numpy"] * 3, way, split_mode="layer")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "devices", "bound"),
    in_turn(
        FIXTURES,
        [
            pytest.param(["numpy"] * 3, SAME, id="numpy*3"),
            pytest.param(*three.values, DRIVERS, id="0,0,0", marks=three.marks),
        ],
    ),
)
def test_q8_0_equals_its_values(folder: Path, name: str, devices: list[str], bound: float) -> None:
    blocks, values = folder / f"{name}-Q8_0.gguf", folder / f"{name}-values.gguf"
    if not values.exists():
        fixture = build(name)
        write(fixture, blocks, quantize=True)
        for tensor, weights in fixture.tensors.items():
            if (blocks_of := quantized(tensor, weights)) is not None:
                fixture.tensors[tensor] = gguf.quants.dequantize(blocks_of, Q8_0)
        write(fixture, values)
    for way in WAYS:
        want = run(folder, f"{name}-values", ["numpy"], way).logits
        assert nmse(run(folder, f"{name}-Q8_0", devices, way).logits, want) <= bound


@pytest.mark.parametrize("name", only(FIXTURES, *MEMORIES))
def test_a_second_sequence_changes_nothing(folder: Path, name: str) -> None:
    other = PROMPT[::-1]
    with opened(model(folder, name), ["numpy"], **OPTIONS | dict(n_slots=2, n_ubatch=32)) as runner:
        rows = []
        for begin, end in [(0, 16), (16, 29), (29, 30)]:
            n = end - begin
            runs = [Run(0, 0, n, begin), Run(1, n, n, begin)]
            step = runner.step(other[begin:end] + PROMPT[begin:end], runs, range(n, 2 * n))
            rows.append(step.copy())
        assert nmse(np.concatenate(rows), golden(name)[:30]) <= EXACT


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "n_before", "n_after"),
    in_turn(FIXTURES, [pytest.param(*n, id=f"{n[0]}-{n[1]}") for n in ((1, 1), (2, 3), (3, 1))]),
)
def test_a_saved_slot_continues_on_other_devices(
    folder: Path, tmp_path: Path, name: str, n_before: int, n_after: int
) -> None:
    """Save the slot after two and a half micro-batches, and load it on other devices."""
    with opened(model(folder, name), ["numpy"] * n_before, **OPTIONS | dict(n_ubatch=16)) as runner:
        for pos in range(0, N_PREFILL, 16):
            n = min(16, N_PREFILL - pos)
            runner.step(PROMPT[pos : pos + n], [Run(0, 0, n, pos)], [])
        held = SlotContent(PROMPT[:N_PREFILL], N_PREFILL, runner.resumable(N_PREFILL))
        saved_state.save(runner, tmp_path / "state", 0, held, 0, None)
    with opened(model(folder, name), ["numpy"] * n_after, **OPTIONS | dict(n_ubatch=16, n_slots=2)) as runner:
        saved_state.load(runner, tmp_path / "state", 1, SlotContent())
        rest = PROMPT[N_PREFILL:]
        got = [runner.step(rest[:4], [Run(1, 0, 4, N_PREFILL)], range(4)).copy()]
        got += [
            runner.step([rest[i]], [Run(1, 0, 1, N_PREFILL + i)], [0]).copy() for i in range(4, len(rest))
        ]
    assert nmse(np.concatenate(got), golden(name)[N_PREFILL:]) <= EXACT


# ---- between the oracles ----


def test_every_architecture_has_a_fixture() -> None:
    assert {name.split("+")[0] for name in FIXTURES} == set(ARCHITECTURES)


def test_every_golden_file_has_a_fixture() -> None:
    of_other_tests = {"adapters", "encoders", "formats", "images", "long_prompts", "pictures"}
    of_other_tests |= {"sentences", "vision"}
    assert {p.stem for p in GOLDEN.glob("*.npz")} == {*FIXTURES, *of_other_tests}
    assert sum(p.stat().st_size for p in GOLDEN.glob("*.npz")) < 5 << 20


@pytest.mark.oracle
@architectures
def test_the_oracles_still_agree(tmp_path: Path, name: str) -> None:
    if missing := [p for p in ("torch", "transformers", "xllamacpp") if find_spec(p) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    from oracles.make_golden import golden as ask

    logits, steered, about = ask(name, tmp_path)
    kept = np.load(GOLDEN / f"{name}.npz")
    for got, want in ((logits, kept["logits"]), (steered, kept["steered"])):
        assert nmse(got, want) <= 1e-10, (about, json.loads(str(kept["about"])))
