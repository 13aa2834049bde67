"""Test adapters, `--fit`, memory and errors of several nodes, which are threads of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import DENSE, EXPERTS, random_pairs, write_adapter
from control_vectors import write_vectors
from device_sets import wide
from groups import OPTIONS, THREE, TOKENS, TWO, here, logits_of_two_slots
from oracles.fixture import write
from oracles.fixtures import build
from runners import load_runner, step_top_k
from tiny_models import Tiny, write_tiny

from vkbackend.errors import DeviceLost, InvalidArgument, OutOfDeviceMemory, PlanError
from vkbackend.limits import Limits
from vkbackend.meta.elsewhere import Card, Elsewhere
from vkbackend.models.engine.runner import loading
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.fitting import fitter
from vkbackend.models.hosts.joining import place_of
from vkbackend.models.placement import fit
from vkbackend.models.placement.host_limits import HostLimit
from vkbackend.step import Run
from vkbackend.tools.measure.twin_nodes import twin_runner
from vkbackend.twins.device import NumpyDevice

pytestmark = pytest.mark.no_vulkan


@pytest.mark.parametrize("split_mode", ["tensor", wide(pytest.param("layer", id="layer"))])
def test_control_vectors(tmp_path: Path, split_mode: str) -> None:
    """Node 1 reads the control vectors from a file next to its copy of the model."""
    tiny, rng = Tiny("llama", n_layer=3), np.random.default_rng(0)
    vectors = {il: rng.normal(size=tiny.n_embd).astype(np.float32) for il in (1, 2)}
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        write_tiny(folder / "model.gguf", tiny)
        write_vectors(folder / "vectors.gguf", vectors)
    path, there = tmp_path / "a" / "model.gguf", str(tmp_path / "b" / "model.gguf")
    steered = OPTIONS | {"control_vectors": [(path.with_name("vectors.gguf"), 2.0)], "split_mode": split_mode}
    results = []
    for options in (OPTIONS, steered):
        single = load_runner(path, devices=here(TWO), **options)
        results.append(logits_of_two_slots(single))
        single.close()
    with twin_runner(path, TWO, models=[None, there], **steered) as runner:
        assert np.array_equal(logits_of_two_slots(runner), results[1]) and not np.array_equal(*results)


@pytest.mark.parametrize("split_mode", ["tensor", wide(pytest.param("layer", id="layer"))])
def test_adapters(tmp_path: Path, split_mode: str) -> None:
    """Node 1 reads the adapters from files next to its copy of the model. Every step lists the adapters of
    its rows."""
    fixture = build("qwen3moe")
    pairs = [random_pairs(fixture, rank, f"{DENSE}|{EXPERTS}") for rank in (2, 3)]
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        write(fixture, folder / "model.gguf")
        for i in range(2):
            write_adapter(folder / f"{i}.gguf", fixture.arch, pairs[i])
    path, there = tmp_path / "a" / "model.gguf", str(tmp_path / "b" / "model.gguf")
    adapted = OPTIONS | {"lora": [path.with_name(f"{i}.gguf") for i in range(2)], "split_mode": split_mode}

    def logits(runner: Runner) -> np.ndarray:
        runs = [Run(0, 0, 20, 0, adapters=((0, 1.0),)), Run(1, 20, 20, 0, adapters=((1, 0.5), (0, -1.0)))]
        out = [runner.step(TOKENS[:40], runs, [19, 39]).copy()]
        out.append(
            runner.step([7, 8], [Run(0, 0, 1, 20, adapters=((0, 1.0),)), Run(1, 1, 1, 20)], [0, 1]).copy()
        )
        return np.concatenate(out)

    single = load_runner(path, devices=here(TWO), **adapted)
    want = logits(single)
    single.close()
    with twin_runner(path, TWO, models=[None, there], **adapted) as runner:
        assert np.array_equal(logits(runner), want) and np.isfinite(want).all()
    write_adapter(tmp_path / "b" / "1.gguf", fixture.arch, pairs[1], alpha=1.0)
    with pytest.raises(PlanError, match="differs in its model"):
        with twin_runner(path, TWO, models=[None, there], **adapted):
            pass


def test_candidates_masks_and_sums(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model.gguf", Tiny("llama", n_vocab=5000, n_layer=1))
    masks = np.random.default_rng(0).integers(0, 1 << 32, (2, -(-5000 // 32)), np.uint32)

    def outputs(runner: Runner) -> list[np.ndarray]:
        assert runner.max_top_k
        runs = [Run(0, 0, 3, 0), Run(1, 3, 1, 0)]
        out = [*step_top_k(runner, [5, 6, 7, 8], runs, [2, 3], 40, masks, True)]
        out += step_top_k(runner, [5, 6, 7, 8], runs, [2, 3], 1)[:2]
        return [np.array(array) for array in out]

    single = load_runner(path, devices=here(THREE), **OPTIONS)
    want = outputs(single)
    single.close()
    with twin_runner(path, THREE, **OPTIONS) as runner:
        assert all(np.array_equal(a, b) for a, b in zip(outputs(runner), want, strict=True))


FITTED = (
    *("n_ctx", "kv_cells", "n_slots", "type_k", "type_v", "tensor_split", "n_gpu_layers", "override_tensor"),
    "moe_cache_mib",
)


@pytest.mark.parametrize(
    ("name", "kib", "n_ctx", "n_layers", "cached"),
    [
        ("llama", 420, 64, None, False),
        wide(pytest.param("llama", 320, 64, 3, False)),
        wide(pytest.param("qwen3moe", 400, 256, None, True)),
    ],
    ids=str,
)
def test_fit_to_the_devices_of_two_hosts(
    tmp_path: Path, name: str, kib: int, n_ctx: int, n_layers: int, cached: bool, monkeypatch: Any
) -> None:
    """Node 0 fits the model to the memory of all nodes' devices. The other nodes load the model in the same
    way."""

    def budgets(devices: Any) -> list[fit.Budget]:
        return [fit.Budget(f"device {d}", kib << 10, (d,)) for d in range(len(devices))]

    for module in (fit, loading, fitter):
        monkeypatch.setattr(module, "budgets_of", budgets)
    path = write(build(name), tmp_path / "model.gguf")
    given = {key: value for key, value in OPTIONS.items() if key != "n_ctx"}
    options = given | {"fit": FITTED, "fit_target": [0.0], "fit_ctx": 64}
    single = load_runner(path, devices=here(THREE), interleave=False, **options)
    step = TOKENS[:40], [Run(0, 0, 40, 0)], [39]
    want, logits = single.options, single.step(*step).copy()
    single.close()
    with twin_runner(path, THREE, **options) as runner:
        assert np.array_equal(runner.step(*step), logits)
        got = runner.options
    assert (got.n_ctx, got.n_gpu_layers, bool(got.moe_cache_mib)) == (n_ctx, n_layers, cached)
    assert [getattr(got, field) for field in FITTED] == [getattr(want, field) for field in FITTED]


def test_memory_of_all_devices(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model.gguf", Tiny("llama", n_layer=1))
    single = load_runner(path, devices=here(THREE), **OPTIONS)
    want = single.memory()
    single.close()
    with twin_runner(path, THREE, **OPTIONS) as runner:
        got = runner.memory()
    assert [row["device"] for row in got] == ["numpy", "node 1/numpy.0", "node 1/numpy.1"]
    for key in ("weights", "kv", "scratch"):
        assert [row[key] for row in got] == [row[key] for row in want]


def test_steady_state_allocates_nothing(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model.gguf", Tiny("llama", n_layer=1))
    with twin_runner(path, TWO, **OPTIONS) as runner:
        for at in range(2):
            runner.step([5], [Run(0, 0, 1, at)], [0])
        provider = runner.mesh.provider
        before = len(provider._exchanges), runner.n_recorded, [d.created for d in runner.mesh.devices]  # type: ignore
        for at in range(2, 6):
            runner.step([5], [Run(0, 0, 1, at)], [0])
        now = len(provider._exchanges), runner.n_recorded, [d.created for d in runner.mesh.devices]  # type: ignore
        assert now == before


def test_a_step_that_cannot_be_recorded_ends_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If recording fails on one node, the group cannot continue, because the other nodes have recorded the
    step."""
    path = write_tiny(tmp_path / "model.gguf", Tiny("llama", n_layer=1))

    def fail(kind: object) -> None:
        raise OutOfDeviceMemory("no memory for a step")

    with pytest.raises(DeviceLost, match="node 0 could not record a step: no memory"):
        with twin_runner(path, TWO, **OPTIONS) as runner:
            monkeypatch.setattr(runner.mesh.steps, "_record", fail)
            with pytest.raises(OutOfDeviceMemory):
                runner.step(TOKENS[:40], [Run(0, 0, 40, 0)], [39])
            runner.step([5], [Run(0, 0, 1, 0)], [0])


def test_another_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both models have tensors of equal shapes, so only the handshake can distinguish them."""
    paths = [write_tiny(tmp_path / f"{seed}.gguf", Tiny("llama", n_layer=1, seed=seed)) for seed in (0, 1)]
    with (
        pytest.raises(PlanError, match="node 1 differs in its model"),
        twin_runner(paths[0], TWO, models=[None, str(paths[1])], **OPTIONS),
    ):
        pass


def test_differing_settings_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vkbackend.models.hosts import joining

    words = iter(['{"fuse": true}', '{"fuse": false}'])
    monkeypatch.setattr(joining, "settings", lambda: next(words))
    path = write_tiny(tmp_path / "model.gguf", Tiny("llama", n_layer=1))
    with pytest.raises(PlanError, match=r"differs in its settings.*fuse"), twin_runner(path, TWO, **OPTIONS):
        pass


def test_a_host_without_the_model_file_is_named(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model.gguf", Tiny("llama", n_layer=1))
    with (
        pytest.raises(DeviceLost, match=r"GGUFError.*nowhere\.gguf"),
        twin_runner(path, TWO, models=[None, str(tmp_path / "nowhere.gguf")], **OPTIONS),
    ):
        pass


@pytest.mark.parametrize("word", ["numpy", "2/numpy", "/0", "0/", "-1/0", "x/0", "٣/0"])
def test_invalid_places(word: str) -> None:
    with pytest.raises(InvalidArgument, match="NODE/DEVICE"):
        place_of(word, 2)


def test_host_memory_is_counted_per_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "least_host_limit", lambda: HostLimit("available", 1000))
    card = Card("numpy", Limits(), True, False, None, None)
    there = [Elsewhere(n, f"node {n}", card) for n in (1, 2)]
    there[0].host_free = 500
    budgets = fit.host_budgets([NumpyDevice("numpy"), *there, NumpyDevice("numpy.1")])
    assert [(b.name, b.nbytes, b.members) for b in budgets] == [
        ("host memory (available)", 980, (0, 3)),
        ("memory of node 1", 490, (1,)),  # node 2 reports no memory
    ]
