"""The placement options -ngl, -ot, -nkvo and -sm do not change the logits, for any shares."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import device_infos, nmse, only, product, wide
from runners import load_runner

from vkbackend.errors import InvalidArgument, OutOfDeviceMemory
from vkbackend.models.engine.runner import loading
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.llm import LLM
from vkbackend.models.options import Options
from vkbackend.models.placement import fit
from vkbackend.models.placement.host_limits import HostLimit
from vkbackend.step import Run

needs_device = pytest.mark.skipif(not device_infos(), reason="no Vulkan device is present")
TOKENS = np.random.default_rng(11).integers(3, 512, 15).tolist()
N_STEPS = 1 + len(TOKENS[12:])


def run(
    models: Path, devices: list[str], name: str = "stories-narrow-F32", **options: Any
) -> tuple[np.ndarray, Runner]:
    runner = load_runner(
        models / f"{name}.gguf",
        devices=devices,
        n_ctx=32,
        n_ubatch=16,
        type_k="f32",
        type_v="f32",
        **options,
    )
    parts = [runner.step(TOKENS[:12], [Run(0, 0, 12, 0)], range(12)).copy()]
    parts += [runner.step([t], [Run(0, 0, 1, 12 + i)], [0]).copy() for i, t in enumerate(TOKENS[12:])]
    runner.report = runner.memory()  # type: ignore[attr-defined]
    runner.close()
    return np.concatenate(parts), runner


@cache
def reference(models: Path, device: str, name: str = "stories-narrow-F32") -> np.ndarray:
    return run(models, [device], name)[0]


def same(models: Path, devices: list[str], **options: Any) -> Runner:
    logits, runner = run(models, devices, **options)
    assert nmse(logits, reference(models, devices[0])) <= 1e-9
    return runner


OPTIONS: dict[str, dict[str, Any]] = {
    **{f"-ngl {n}": {"n_gpu_layers": n} for n in (0, 1, 3, 6)},
    "-nkvo": {"kv_offload": False},
    **{
        pattern: {"override_tensor": ((pattern, "CPU"),)}
        for pattern in ("attn", "ffn_", "^output", "token_embd", r"blk\.1\.")
    },
    "mixed": {
        "override_tensor": ((r"blk\.[01]\.ffn", "host"), ("attn_q", "cpu")),
        "kv_offload": False,
        "n_gpu_layers": 4,
    },
}
NAMED = {name: pytest.param(options, id=name) for name, options in OPTIONS.items()}
ON_NUMPY = only(
    product(NAMED.values(), [3, 1]),
    *("-ngl 3-1", "-nkvo-3", "^output-1", "mixed-3"),
)


@pytest.mark.parametrize(("options", "n"), ON_NUMPY)
def test_host_placement_on_numpy(models: Path, options: dict[str, Any], n: int) -> None:
    same(models, ["numpy"] * n, **options)


@needs_device
@pytest.mark.parametrize("options", only([NAMED[name] for name in ("-ngl 0", "-nkvo", "mixed")], "mixed"))
def test_host_placement_on_vulkan(models: Path, options: dict[str, Any]) -> None:
    runner = same(models, ["0", "0"], **options)
    assert all(row["host"] for row in runner.report)  # type: ignore[attr-defined]


PLACED = {
    "attention": "attn_", "ffn": r"ffn_(up|gate|down)\.", "experts": "_exps", "output": "^output",
    "embedding": "token_embd",
}  # fmt: skip
ON_VULKAN: list[tuple[str, dict[str, Any]]] = [
    *((kind, {"override_tensor": ((pattern, "CPU"),)}) for kind, pattern in PLACED.items()),
    *((f"-ngl {n}", {"n_gpu_layers": n}) for n in (0, 1, 3, 6)),
    ("-nkvo", {"kv_offload": False}),
]


@pytest.mark.wide
@pytest.mark.skipif(len(device_infos()) < 2, reason="needs devices of two drivers")
@pytest.mark.parametrize(("kind", "options"), ON_VULKAN, ids=[kind for kind, _ in ON_VULKAN])
@pytest.mark.parametrize("devices", ["0", "0,0", "0,0,0", "0,1", "0,0,0,0,0", "0,0,0,0,0,0,0,0"])
def test_every_placement_on_every_number_of_devices(
    models: Path, kind: str, options: dict[str, Any], devices: str
) -> None:
    name = "stories-moe8x-Q4_0" if kind == "experts" else "stories-narrow-F32"
    # Copy the weights to memory, without a memory map of the file.
    logits, runner = run(models, devices.split(","), name, use_mmap=False, **options)
    assert nmse(logits, reference(models, "0", name)) <= (1e-6 if "1" in devices else 1e-9)
    # The embedding table is always a copy, and -ngl 6 puts all layers on devices.
    if kind not in ("embedding", "-ngl 6"):
        assert any(row["host"] for row in runner.report)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "n"),
    [
        wide(pytest.param({"tensor_split": [5, 3, 2]}, 3)),
        ({"tensor_split": [0, 1, 1]}, 3),
        wide(pytest.param({"tensor_split": [1, 0]}, 2)),
        ({}, 5),
        wide(pytest.param({}, 8)),
        ({"split_policy": "llama.cpp"}, 3),
        wide(pytest.param({"split_policy": "llama.cpp", "tensor_split": [1, 0, 1]}, 3)),
        wide(pytest.param({"override_tensor": ((r"blk\.2\.attn", "1"),)}, 2)),
        wide(pytest.param({"override_tensor": (("ffn", "1"), ("attn", "0"))}, 2)),
        ({"override_tensor": (("^output.weight", "0"),)}, 2),
        ({"split_mode": "none", "main_gpu": 1}, 2),
    ],
    ids=str,
)
def test_shares(models: Path, options: dict[str, Any], n: int) -> None:
    same(models, ["numpy"] * n, **options)


@pytest.mark.parametrize(
    ("n", "split"), [*(wide(pytest.param(n, None)) for n in (1, 2)), (3, None), (2, [3, 1])]
)
def test_layer_mode_exchanges_once_per_boundary(models: Path, n: int, split: list[float] | None) -> None:
    runner = same(models, ["numpy"] * n, split_mode="layer", tensor_split=split)
    assert runner.reduce_stats()[0] == N_STEPS * (n - 1)


def test_hosts_split_layers_over_their_devices(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer has two sums, and only the second sum is sent to the next node."""
    monkeypatch.setattr(Options, "nodes", ("0", "1", "1", "0"))
    runner = same(models, ["numpy"] * 4, split_mode="hosts", tensor_split=[1, 1, 1, 3])
    assert runner.layout.active["blk.0"] == (0, 3) and runner.layout.active[""] == (1, 2)
    assert runner.reduce_stats()[0] == N_STEPS * 2 * runner.model.n_layer


@needs_device
def test_layer_mode_on_vulkan(models: Path) -> None:
    same(models, ["0", "0", "0"], split_mode="layer")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"override_tensor": (("nope", "CPU"),)}, "no tensor's name matches"),
        ({"override_tensor": (("ffn", "7"),)}, "place in -dev, which is 0 to 1"),
        ({"override_tensor": (("(", "CPU"),)}, "not a regular expression"),
        ({"split_mode": "rows"}, "split mode 'rows'.*none, layer, tensor, hosts"),
        ({"split_mode": "none", "main_gpu": 2}, "main device 2"),
        ({"main_gpu": 2}, "main device 2"),
        ({"n_gpu_layers": -3}, "n_gpu_layers"),
        ({"split_policy": "best"}, "policy 'best'"),
        ({"reduce_type": "f8"}, "reduce type 'f8'.*auto, f32, bf16, f16"),
        ({"reduce_provider": "nvlink"}, "provider 'nvlink'"),
        ({"submit_ahead": -1}, "submit_ahead=-1"),
    ],
    ids=str,
)
def test_refusals(models: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        run(models, ["numpy", "numpy"], **options)


def test_a_model_that_does_not_fit_is_refused_with_a_way_to_fit(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_devices_sharing_little(_: object) -> list[fit.Budget]:
        return [fit.Budget("small", 3_400_000, (0, 1))]

    monkeypatch.setattr(fit, "budgets_of", two_devices_sharing_little)
    with pytest.raises(
        OutOfDeviceMemory, match=r"small would hold .* MiB of KV cache.*-c \d+.*-ngl \d.*-nkvo"
    ) as caught:
        load_runner(
            models / "stories-narrow-F32.gguf",
            devices=["numpy"] * 2,
            n_ctx=8192,
            type_k="f32",
            type_v="f32",
        )
    assert caught.value.requested > caught.value.budget == 3_400_000


@pytest.mark.parametrize(("room", "held"), [(1 << 40, 6), (750_000, 3), wide(pytest.param(150_000, 0))])
def test_auto_takes_as_many_layers_as_fit(
    models: Path, monkeypatch: pytest.MonkeyPatch, room: int, held: int
) -> None:
    same(models, ["numpy"])
    for module in (fit, loading):
        monkeypatch.setattr(module, "budgets_of", lambda _: [fit.Budget("small", room, (0, 1))])
    runner = same(models, ["numpy"] * 2, n_gpu_layers="auto")
    n_layers = runner.options.n_gpu_layers
    assert (6 if n_layers is None else n_layers) == held
    assert f"{held} of 6 layers" in runner.notes[-1]
    if held < 6:
        with pytest.raises(OutOfDeviceMemory):
            same(models, ["numpy"] * 2, n_gpu_layers=held + 1)


def test_layers_fit_both_device_and_host(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has memory for 4 layers. Layers beyond the fourth need host memory."""

    def held(n: int) -> tuple[int, int]:
        [row] = run(models, ["numpy"], n_gpu_layers=n)[1].report  # type: ignore[attr-defined]
        return sum(row[home] for home in fit.ON_DEVICE), sum(row[home] for home in fit.ON_HOST)

    on_device, on_host = held(4)
    assert held(5)[0] > on_device and held(3)[1] > on_host
    exact = 1 / (1 - fit.RESERVE)
    for module in (fit, loading):
        monkeypatch.setattr(module, "budgets_of", lambda _: [fit.Budget("small", on_device, (0,))])
    limit = HostLimit("available", int(on_host * exact) + 2)
    monkeypatch.setattr(fit, "least_host_limit", lambda: limit)
    assert run(models, ["numpy"], n_gpu_layers="auto")[1].options.n_gpu_layers == 4
    with pytest.raises(OutOfDeviceMemory, match=r"4 layers on the devices \(-ngl 4\)"):
        run(models, ["numpy"])


@needs_device
def test_logical_devices_of_a_physical_one_share_its_budget() -> None:
    devices = open_devices(["0", "numpy", "0"])
    try:
        [budget] = fit.budgets_of(devices)
        heap = max(h.budget or h.nbytes for h in devices[0].info.heaps if h.device_local)  # type: ignore[attr-defined]
        assert budget.members == (0, 2) and 0.97 * heap < budget.nbytes < heap
    finally:
        for device in devices:
            device.close()


def test_host_memory_is_a_budget_too(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "least_host_limit", lambda: HostLimit("limit of the control group", 1 << 20))
    path = models / "stories-narrow-F32.gguf"
    with pytest.raises(
        OutOfDeviceMemory,
        match=r"host memory \(limit of the control group\) would hold .* MiB of tensors placed",
    ):
        load_runner(path, devices=["numpy"] * 2, n_gpu_layers=0)


@needs_device
def test_automatic_split_gives_equal_devices_equal_shares(
    models: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    runner = same(models, ["0", "0"], tensor_split="auto")
    assert runner.options.tensor_split == (16, 16)
    assert runner.prediction is not None and runner.prediction.n_reduces == 2 * runner.model.n_layer


@pytest.mark.parametrize(
    ("options", "n"),
    only(
        product(
            [
                pytest.param({"n_gpu_layers": 3}, id="-ngl 3"),
                pytest.param({"override_tensor": (("_exps", "CPU"),)}, id="experts"),
            ],
            [1, 3],
        ),
        "-ngl 3-1",
    ),
)
def test_experts_on_the_host(models: Path, options: dict[str, Any], n: int) -> None:
    name = "stories-moe8x-Q4_0"
    logits, runner = run(models, ["numpy"] * n, name, **options)
    assert nmse(logits, reference(models, "numpy", name)) <= 1e-9
    assert all(row["host"] for row in runner.report)  # type: ignore[attr-defined]


def test_a_cache_above_one_binding_is_refused_with_a_way_to_fit(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fit, "budgets_of", lambda _: [fit.Budget("narrow", 1 << 40, (0,), max_binding=1 << 20)]
    )
    path = models / "stories-narrow-F32.gguf"
    with pytest.raises(OutOfDeviceMemory, match=r"reads at most 1 MiB at once.*-c (\d+)") as caught:
        load_runner(path, devices=["numpy"], n_ctx=1 << 16)
    fitting = int(str(caught.value).split("(-c ")[1].split(")")[0])
    load_runner(path, devices=["numpy"], n_ctx=fitting).close()
    with pytest.raises(OutOfDeviceMemory):
        load_runner(path, devices=["numpy"], n_ctx=2 * fitting)


@cache
def on_three(models: Path, **how: Any) -> np.ndarray:
    path = models / "stories-narrow-Q8_0.gguf"
    with LLM(path, devices=["numpy"] * 3, n_ctx=32, **how) as llm:
        return llm.logits(TOKENS[:6])


@pytest.mark.parametrize(
    ("provider", "ahead"), only(product(["pages", "scatter", "host-sum"], [0, None, 1]), "scatter-0")
)
def test_reduce_options_give_the_same_bits(models: Path, provider: str, ahead: int | None) -> None:
    logits = on_three(models, reduce_provider=provider, submit_ahead=ahead)
    assert np.array_equal(logits, on_three(models))


@pytest.mark.parametrize("options", [{"reduce_provider": "p2p"}, {"submit_ahead": -1}], ids=str)
def test_invalid_reduce_options_are_refused(models: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"p2p|submit_ahead=-1"):
        LLM(models / "stories-narrow-Q8_0.gguf", devices=["numpy"], **options)
