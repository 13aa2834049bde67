"""Under the router, `--fit` chooses a context for the memory that the other models leave. If this memory is
too small, other models must free enough for the shortest context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_vision import write_projector

from vkbackend.errors import OutOfDeviceMemory
from vkbackend.meta.elsewhere import HeapCard, PhysicalCard
from vkbackend.models.arguments import HOST
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.options import Options
from vkbackend.models.vision.projector import Projector
from vkbackend.tools.server.router.cards import FoundCard, Machine, card_of
from vkbackend.tools.server.router.places import fitted_places, place_on
from vkbackend.twins.device import NumpyDevice

pytestmark = pytest.mark.no_vulkan
MIB, ROOM = 1 << 20, 1 << 40


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr("vkbackend.tools.server.router.cards.measure_speed", lambda device: SPEED)
    cards = {}
    for word, rate in (("fast", 2e9), ("slow", 1e9)):
        heaps = (HeapCard(ROOM, True, ROOM), HeapCard(ROOM, False, ROOM))
        physical = PhysicalCard(word, word, "AMD", "simulated", "1", False, heaps)
        card = replace(card_of(NumpyDevice(word)), physical=physical, speed=(rate, 1e8))
        cards[word] = FoundCard(word, word, card, ROOM, False)
    return Machine(cards, ("fast", "slow"), ROOM)


class SPEED:
    weights = host = 1e9


def test_the_context_follows_what_is_left(models: Path, machine: Machine) -> None:
    path = models / "stories-narrow-F32.gguf"
    names = "n_ctx", "type_k", "type_v", "kv_cells", "tensor_split"
    given: dict[str, Any] = {"n_ctx": 512, "n_slots": 2, "fit_ctx": 256, "fit_target": 0, "fit": names}
    options, budgets = Options.of(path, **given), {"fast": ROOM, "slow": ROOM, HOST: ROOM}

    def placed(left: dict[str, int]) -> list[tuple[str, int]]:
        places = fitted_places(options, machine, budgets, budgets | left, None)
        for place in places:
            assert place.chosen["fit"] is False and f"-c {place.chosen['n_ctx']}" in place.flags
            room = (budgets | left)[place.devices[0]]
            assert place.held[place.devices[0]] <= room or place.chosen["n_ctx"] == 256
        return [(place.devices[0], place.chosen["n_ctx"]) for place in places]

    assert placed({}) == [("fast", 512), ("slow", 512)]
    [whole, _] = fitted_places(options, machine, budgets, budgets, None)
    less = int(whole.held["fast"] * 0.87)
    assert placed({"fast": less}) == [("slow", 512)]  # a longer context has priority over a faster card
    [(device, n_ctx), *_] = placed({"fast": less, "slow": MIB})
    assert device == "fast" and 256 <= n_ctx < 512
    # No device has enough memory for the longer context. So other models must free enough for the shortest
    # context.
    assert placed({"fast": MIB, "slow": MIB}) == [("fast", 256), ("slow", 256)]


def test_a_projector_has_memory_on_its_device(models: Path, machine: Machine, tmp_path: Path) -> None:
    projector = write_projector(tmp_path / "mmproj.gguf", 64)
    [device] = open_devices(["numpy"])
    with Projector.open(projector, device) as opened:
        n = opened.memory()
    on_device = n["weights"] + n["kv"] + n["scratch"]
    budgets = {"fast": ROOM, "slow": ROOM, HOST: ROOM}

    def held(**given: Any) -> Mapping[str, int]:
        options = Options.of(models / "stories-narrow-F32.gguf", mmproj=projector, **given)
        return place_on(options, ("fast",), machine, budgets).held

    together, apart = held(), held(mmproj_device="slow")
    assert apart["slow"] == on_device and together["fast"] == apart["fast"] + on_device
    assert together[HOST] == apart[HOST] >= n["staging"]
    budgets["fast"] = together["fast"] - 1
    with pytest.raises(OutOfDeviceMemory):
        held()
    budgets["slow"] = on_device - 1
    with pytest.raises(OutOfDeviceMemory, match="of the projector"):
        held(mmproj_device="slow")


@pytest.mark.wide
def test_a_projector_is_on_the_fastest_card_with_room(models: Path, machine: Machine, tmp_path: Path) -> None:
    projector = write_projector(tmp_path / "mmproj.gguf", 64)
    given: dict[str, Any] = {"mmproj": projector, "n_ctx": 64, "tensor_split": [1, 1]}
    options = Options.of(models / "stories-narrow-F32.gguf", devices=["slow", "fast"], **given)
    budgets = {"fast": ROOM, "slow": ROOM, HOST: ROOM}
    place = place_on(options, ("slow", "fast"), machine, budgets)
    assert place.chosen == {"mmproj_device": "fast"}
    budgets["fast"] = place.held["fast"] - 1
    other = place_on(options, ("slow", "fast"), machine, budgets)
    assert other.chosen == {"mmproj_device": "slow"}
    assert sum(other.held.values()) == sum(place.held.values())
    named = replace(options, mmproj_device="slow")
    assert place_on(named, ("slow", "fast"), machine, budgets).chosen == {"mmproj_device": "slow"}


def test_a_device_without_a_share_holds_nothing(models: Path, machine: Machine) -> None:
    path, budgets = models / "stories-narrow-F32.gguf", {"fast": ROOM, "slow": ROOM, HOST: ROOM}
    alone = place_on(Options.of(path, n_ctx=64), ("slow",), machine, budgets)
    both = Options.of(path, n_ctx=64, devices=["slow", "fast"], tensor_split=[1, 0])
    assert place_on(both, ("slow", "fast"), machine, budgets) == alone
