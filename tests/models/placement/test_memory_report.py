"""The memory report equals the plan and the bytes that devices allocate."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from adapters import DENSE, EXPERTS, random_pairs, write_adapter
from device_sets import covering, device_infos, for_every_runtime, wide
from oracles.fixture import write
from oracles.fixtures import build
from oracles.heads import with_head
from runners import load_runner

from vkbackend.buffer import Home
from vkbackend.errors import OutOfDeviceMemory
from vkbackend.meta.step_kind import StepKind
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.placement import fit
from vkbackend.models.placement.fit import sizes_with
from vkbackend.models.placement.layout import layouts
from vkbackend.models.placement.memory_report import HOMES, ITEMS, allocations, itemised, stored_nbytes
from vkbackend.models.placement.traced_steps import step_shape, step_sizes
from vkbackend.step import Run

needs_device = pytest.mark.skipif(not device_infos(), reason="no Vulkan device is present")


@pytest.mark.parametrize(
    ("provider", "devices"),
    covering(
        ["auto", "scatter", "host-sum", "visible", "copies"],
        [pytest.param(["0", "0"], id="0,0", marks=needs_device), pytest.param(["numpy"] * 3, id="3 x numpy")],
    ),
)
def test_memory_report_equals_the_plan(models: Path, devices: list[str], provider: str) -> None:
    path = models / "stories-narrow-Q8_0.gguf"
    options = {"n_ctx": 64, "n_ubatch": 16, "kv_offload": False, "reduce_provider": provider}
    runner = load_runner(path, devices=devices, **options)
    n, limits = len(devices), [device.limits for device in runner.mesh.devices]
    shape = step_shape(runner.model, runner.layout, runner.options, 16)
    steps = step_sizes(runner.model, runner.layout, runner.options, limits, shape)
    types = {load.name: load.dtype for load in runner.layout.loads}
    layout_of = layouts(runner.model, types, len(runner.mesh.devices))
    planned = sizes_with(layout_of, runner.mesh.devices, steps)(runner.options)
    for row, plan, device in zip(runner.memory(), planned, runner.mesh.devices, strict=True):
        assert {home: row[home] for home in HOMES} == {home: plan.homes[home] for home in HOMES}
        assert device.nbytes[Home.HOST] == row["host"] and device.nbytes[Home.WEIGHTS] == row["weights"]
    runner.step(list(range(1, 17)), [Run(0, 0, 16, 0)], [15])
    assert [row["scratch"] for row in runner.memory()] == [steps.scratch(d) for d in range(n)]
    runner.close()


MIXED_FILES = ("narrow-F32", "w256-Q4_K", "w256-IQ3_S", "w256-TQ1_0", "moe8x-MXFP4", "qwen2-Q8_0")
REPORTED: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"tensor_split": [3, 1]}),
    (3, {"tensor_split": [5, 0, 2], "split_policy": "llama.cpp"}),
    (5, {"kv_offload": False, "n_gpu_layers": 2}),
    (8, {"override_tensor": (("ffn", "CPU"),), "type_k": "q8_0"}),
    (2, {"split_mode": "layer", "n_slots": 3}),
]


@pytest.mark.parametrize(
    ("name", "n", "options"),
    covering(MIXED_FILES, [pytest.param(*r, id=f"{r[0]}-{r[1]}") for r in REPORTED]),
)
def test_the_memory_report_equals_the_allocator_and_adds_up(
    models: Path, tmp_path: Path, name: str, n: int, options: dict[str, Any]
) -> None:
    if "narrow" in name and options.get("type_k") == "q8_0":
        options = options | {"type_k": "bf16"}
    path = models / f"stories-{name}.gguf"
    check_report(path, ["numpy"] * n, **options)


@needs_device
@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        for_every_runtime(pytest.param("w256-IQ3_S", "", id="w256-IQ3_S")),
        pytest.param("narrow-Q8_0", "host_import", id="narrow-Q8_0"),
        wide(
            for_every_runtime(pytest.param("moe8x-Q4_0", "host_import", id="moe8x-Q4_0"), wide=True),
        ),
    ],
)
def test_the_memory_report_of_real_devices(
    models: Path, monkeypatch: pytest.MonkeyPatch, name: str, lacking: str
) -> None:
    monkeypatch.setenv("VKBACKEND_DISABLE", lacking)
    path = models / f"stories-{name}.gguf"
    signal = "semaphore" if os.environ.get("VKBACKEND_RUNTIME") == "kompute" else "flag"  # kompute lacks it
    check_report(path, ["0", "0", "numpy"], tensor_split=[3, 1, 1], reduce_signal=signal)
    check_report(path, ["0"])


@pytest.mark.parametrize("n", [wide(pytest.param(1)), 3])
def test_the_memory_report_counts_a_head(tmp_path: Path, n: int) -> None:
    path = write(with_head("glm-dsa"), tmp_path / "model.gguf")
    check_report(path, ["numpy"] * n, speculation="mtp")


@pytest.mark.parametrize(
    "options",
    [{"tensor_split": [3, 1]}, wide(pytest.param({"split_mode": "layer"})), {"n_gpu_layers": 0}],
    ids=str,
)
def test_the_memory_report_counts_adapters(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = build("qwen3moe")
    path = write(fixture, tmp_path / "model.gguf")
    pairs = [random_pairs(fixture, rank, f"{DENSE}|{EXPERTS}") for rank in (2, 4)]
    lora = [write_adapter(tmp_path / f"{i}.gguf", fixture.arch, p) for i, p in enumerate(pairs)]
    check_report(path, ["numpy"] * 2, lora=lora, **options)
    held, parts = [], []
    for files in ((), lora):
        runner = load_runner(path, devices=["numpy"] * 2, n_ctx=64, n_ubatch=4, lora=files, **options)
        held.append([(row["weights"] + row["host"], row["adapters"]) for row in runner.memory()])
        parts.append([load for load in runner.layout.loads if load.name not in runner.layout.adapters])
        runner.close()
    assert parts[0] == parts[1] and not any(adapters for _, adapters in held[0])
    # two adapters of rank 2 need as much as one of rank 4
    stored = sum(4 * 4 * (a.size + b.size) for a, b in pairs[0].values())
    assert sum(adapters for _, adapters in held[1]) >= stored
    for (without, _), (total, adapters) in zip(*held, strict=True):
        padding = total - without - adapters
        assert 0 <= padding < 300 * len(parts[1]), "each tensor is aligned"
    monkeypatch.setattr(fit, "budgets_of", lambda _: [fit.Budget("small", 1000, (0, 1))])
    with pytest.raises(OutOfDeviceMemory, match=r"\(these include .* MiB of LoRA adapters\)"):
        load_runner(path, devices=["numpy"] * 2, n_ctx=64, n_ubatch=4, lora=lora, **options)


def check_report(path: Path, devices: list[str], **options: Any) -> None:
    runner = load_runner(path, devices=devices, n_ctx=64, n_ubatch=4, **options)
    try:
        layout, mesh = runner.layout, runner.mesh
        mesh.recorded_step(StepKind.of_run(1, 1, runner.max_top_k))
        limits = [device.limits for device in mesh.devices]
        steps = step_sizes(
            runner.model, layout, runner.options, limits, step_shape(runner.model, layout, runner.options, 4)
        )
        report = allocations(layout, mesh.devices, steps, runner.options)
        for row, held, device in zip(runner.memory(), report, mesh.devices, strict=True):
            assert {home: row[home] for home in HOMES} == {home: held.homes[home] for home in HOMES}
            assert sum(held.homes.values()) == sum(held.items.values()) and held.items["padding"] >= 0
            nbytes = {
                home: device.nbytes[Home[home.upper()]] for home in ("weights", "kv", "scratch", "host")
            }
            assert nbytes == {home: row[home] for home in nbytes}
        pages = Home.PAGES, Home.MAPPED
        counted = sum(n for d in mesh.devices for home, n in d.nbytes.items() if home not in pages)
        counted += max(device.nbytes[Home.PAGES] for device in mesh.devices)
        counted += sum(row["mapped"] for row in runner.memory())
        assert all(
            bool(row["mapped"]) == d.maps_files for row, d in zip(runner.memory(), mesh.devices, strict=True)
        )
        parts = itemised(layout, report)
        assert parts["held"] == counted == sum(parts[item] for item in ITEMS)
        weights = [load for load in layout.loads if load.name not in layout.adapters]
        assert min(parts.values()) >= 0 and parts["model"] == sum(map(stored_nbytes, weights))
        assert parts["adapters"] == sum(row["adapters"] for row in runner.memory())
        with GGUF.open(path) as gguf:
            stored = sum(tensor.nbytes for tensor in gguf.tensors.values())
        tied = [
            load for load in layout.loads if load.name == "output.weight" and load.name not in gguf.tensors
        ]
        wider = parts["model"] - stored - sum(map(stored_nbytes, tied))
        vectors = sum(stored_nbytes(load) for load in weights if len(load.shape) == 1)
        assert 0 <= wider <= vectors, "the file's bytes, but for vectors that devices hold as f32"
    finally:
        runner.close()
