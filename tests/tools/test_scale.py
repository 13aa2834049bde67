"""Simulated cards refuse the same models as real cards. `vkbackend.tools.studies.scale` measures recordings
for these cards."""

from __future__ import annotations

import math

import pytest

from vkbackend.buffer import Home
from vkbackend.errors import OutOfDeviceMemory
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.options import Options
from vkbackend.models.placement.fit import RESERVE
from vkbackend.models.placement.layout import lay_out, sizes
from vkbackend.models.placement.traced_steps import trace_reduces
from vkbackend.tools.measure import simulated, synthetic
from vkbackend.tools.measure.simulated import ALLOCATION_NBYTES, SimulatedDevice
from vkbackend.tools.studies import scale

pytestmark = pytest.mark.no_vulkan
GIB = 1 << 30


def test_a_card_is_full_at_its_size() -> None:
    card = SimulatedDevice(0, 8 * GIB)
    card.buffer(ALLOCATION_NBYTES, Home.WEIGHTS, "a")
    with pytest.raises(OutOfDeviceMemory, match="at once"):
        card.buffer(ALLOCATION_NBYTES + 1, Home.WEIGHTS, "b")
    card.buffer(4 * GIB - 4096, Home.KV, "c")
    assert card.allocations == 2
    with pytest.raises(OutOfDeviceMemory, match="no heap"):
        card.buffer(128 << 20, Home.KV, "d")  # The small BAR has room, and is not used.
    card.buffer(9 * GIB // 4, Home.HOST, "e")
    assert card.heaps[1] == 9 * GIB // 4


def test_allocations_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "MAX_ALLOCATIONS", 2)
    card = SimulatedDevice(0, GIB)
    for _ in range(2):
        card.buffer(256, Home.KV, "a")
    with pytest.raises(OutOfDeviceMemory, match="allocation 3"):
        card.buffer(256, Home.KV, "a")


def test_the_context_that_fits() -> None:
    assert scale.context_in(8, 9 * GIB, GIB) == "-"
    assert scale.context_in(24, 2 * GIB, GIB) == "128k"
    assert scale.context_in(8, round(7.84 * GIB) - GIB // 2, GIB) == "64k"


@pytest.mark.parametrize("n", [1, 2])
def test_the_tables(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ("llama", 4096, True, synthetic._dense(2, 256, 8, 4, 32, 768))
    monkeypatch.setitem(synthetic.SHAPES, "tiny", shape)
    monkeypatch.setattr(scale, "N_CTX", 1024)
    table = scale.measure("tiny:F16", n)
    host = dict(zip([*scale.HOST[:4], *range(6), *"abcdefghi"], table.host, strict=True))
    cards = dict(zip(scale.columns_of(scale.MEMORY_GIB), table.cards, strict=True))
    assert host["cards"] == cards["cards"] == n and min(host["start s"], host["token s"]) > 0
    assert 20 < host["a"] < host["b"] and host["c"] > 3 * host["a"], "dispatches, and descriptors of them"
    assert host["g"] < min(host["e"], host["f"]), "some pipelines are of both steps"
    assert host["i"] <= host["h"], "a faster card is given no more submissions"
    weights = sum(info.nbytes for info in synthetic.Synthetic("tiny:F16").tensors.values())
    assert cards["allocations"] < 40 and cards["weights GiB"] < 2 * weights / n / 2**30
    assert cards["KV GiB of 128k"] == pytest.approx(2 * 2 * 2 * 1024 * 128 / n / 2**30, rel=0.05)
    assert cards["context in 8 GiB"] == "1k"


@pytest.mark.parametrize(
    ("n", "gib", "overrides"),
    [
        pytest.param(8, 80, (), id="8 x 80 GiB", marks=pytest.mark.wide),
        pytest.param(4, 24, (("_exps", "CPU"),), id="4 x 24 GiB", marks=pytest.mark.wide),
    ],
)
def test_a_model_of_671b_fits(n: int, gib: int, overrides: tuple[tuple[str, str], ...]) -> None:
    """The model's format is Q4_K. If a model runs on few cards, the experts are in host memory."""
    gguf = synthetic.Synthetic("deepseek-671b-a37b:Q4_K")
    n_values = sum(math.prod(info.shape) for info in gguf.tensors.values())
    assert 670e9 < n_values < 673e9
    model = load_model(gguf)
    types = {spec.name: tensor.type for spec in model.weights() if (tensor := spec.tensor(gguf))}
    options = Options("a shape", n_ctx=32_768, devices=["numpy"] * n, override_tensor=overrides)
    layout = lay_out(model, types, n, options)
    # The latent cache has a single head, which every card stores: 576 values of two bytes for K, and 512 for
    # V.
    latent = 61 * 32_768 * 2 * (576 + 512)
    for size in sizes(layout):
        assert size["kv"] == latent
        assert size["weights"] + size["kv"] < (1 - RESERVE) * gib * GIB - GIB, "a GiB for steps"
    whole = sum(info.nbytes for info in gguf.tensors.values())
    assert (sum(size["weights"] for size in sizes(layout)) < whole / 10) == bool(overrides)
    reduces = trace_reduces(model, layout, options, [device.limits for device in cards(n)])
    assert [r.elements for r in reduces] == [7168] * (2 * 61)


def cards(n: int) -> list[SimulatedDevice]:
    return [SimulatedDevice(i, GIB) for i in range(n)]
