"""The fastest device whose memory holds both the model's share and the projector runs the projector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from device_sets import two_drivers
from tiny_vision import write_projector

from vkbackend import LLM
from vkbackend.limits import Limits
from vkbackend.meta.elsewhere import Card, Elsewhere, HeapCard, PhysicalCard
from vkbackend.meta.exchange_times import ExchangeTime
from vkbackend.models.engine.projectors import planned_projector, projector_index
from vkbackend.models.engine.runner.loading import Loading
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options
from vkbackend.models.placement.fit import ON_DEVICE
from vkbackend.models.placement.projector_device import fastest_with_room
from vkbackend.models.placement.resident import Resident
from vkbackend.tools.cli import main

ROOM = 1 << 40
TEXT = "stories-narrow-F32.gguf"


@pytest.mark.no_vulkan
@pytest.mark.parametrize(
    ("speeds", "left", "best"),
    [
        ([1, 2], [9, 1], 1),  # the fastest with room
        ([1, 2], [9, 0], 1),
        ([1, 2], [9, -1], 0),
        ([1, 2, 3], [9, 1, -1], 1),
        # if speeds are about equal, the device with the most free memory is chosen
        ([95, 100, 80], [9, 2, 99], 0),
        ([100, 95], [92, 100], 0),  # about as much
        ([1, 1], [5, 5], 0),
        ([9, 1], [-8, -2], 1),  # no room anywhere
    ],
)
def test_the_fastest_with_room(speeds: list[float], left: list[int], best: int) -> None:
    assert fastest_with_room(speeds, left) == best


def card(name: str, speed: float, nbytes: int) -> Elsewhere:
    heaps = (HeapCard(nbytes, True, nbytes), HeapCard(ROOM, False, ROOM))
    physical = PhysicalCard(name, name, "AMD", "simulated", "1", False, heaps)
    described = Card(name, Limits(), False, False, nbytes, physical, (speed, 1e8))
    return Elsewhere(0, "this machine", described, ExchangeTime(1e-4, 1e10))


@pytest.fixture
def mmproj(tmp_path: Path) -> Path:
    return write_projector(tmp_path / "mmproj.gguf", 64)


def best(options: Options, *cards: Elsewhere, besides: Sequence[Resident] = ()) -> str:
    with GGUF.open(options.path) as text:
        return cards[projector_index(options, cards, text, besides)].card.name


def options_of(models: Path, mmproj: Path, **given: Any) -> Options:
    return Options.of(models / TEXT, devices=["a", "b"], mmproj=mmproj, n_ctx=64, n_ubatch=16, **given)


@pytest.mark.no_vulkan
def test_a_small_fast_card_and_a_large_slow_one(models: Path, mmproj: Path) -> None:
    """Half of the model is on each card."""
    options, slow = options_of(models, mmproj, tensor_split=[1, 1]), card("slow", 1e9, ROOM)
    with GGUF.open(models / TEXT) as text:
        cost = Loading(text, options, None, [slow, slow], None).cost([slow, slow])
        plan = planned_projector(options, slow, text)
    needed = cost((1, 1)).held[0] + sum(plan.held.homes[home] for home in ON_DEVICE)
    room = int(needed / 0.98) + 2  # fit.RESERVE
    fast = card("fast", 4e9, room)
    assert best(options, fast, slow) == "fast"
    assert best(options, slow, card("fast", 4e9, int(0.98 * room))) == "slow"
    other_model = replace(plan.resident, devices=(fast,))
    assert best(options, fast, slow, besides=[other_model]) == "slow"


@pytest.mark.wide
@pytest.mark.no_vulkan
def test_shares(models: Path, mmproj: Path) -> None:
    """If cards are equal, the card with the smaller share of the model is chosen."""
    one, other, fast = (card(name, speed, ROOM) for name, speed in (("1", 1e9), ("2", 1e9), ("fast", 4e9)))
    small = [card(name, 1e9, 1 << 22) for name in ("1", "2")]
    assert best(options_of(models, mmproj, tensor_split=[3, 1]), *small) == "2"
    assert best(options_of(models, mmproj, tensor_split=[1, 1]), one, other) == "1"
    assert best(options_of(models, mmproj), one, fast) == "fast"  # shares by speed
    fitted = options_of(models, mmproj, fit=("n_ctx", "tensor_split"), fit_ctx=64)
    assert best(fitted, one, fast) == "fast"


@pytest.mark.wide
@two_drivers
@pytest.mark.parametrize("words", ["0,1", "1,0", "0,0,1"])
def test_the_plan_the_engine_and_python_agree(
    models: Path, mmproj: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    """llvmpipe and SwiftShader share the memory of the host, so the faster driver is chosen in any order."""
    with LLM(models / TEXT, devices=words.split(","), mmproj=mmproj, n_ctx=64) as llm:
        *_, row = llm.memory()
        assert f"the projector is on {row['device'].removesuffix(' (projector)')}" in llm.notes
    assert main(["plan", "-m", str(models / TEXT), "--mmproj", str(mmproj), "-c", "64", "-dev", words]) == 0
    table = capsys.readouterr().out.partition("projector in MiB")[2].splitlines()
    assert table[2].split()[0] == row["device"].split()[0]
    with LLM(models / TEXT, devices=words.split(","), mmproj=mmproj, n_ctx=64, mmproj_device="1") as llm:
        assert llm.memory()[-1]["device"] == "Vulkan1 (projector)"
        assert not any("projector" in note for note in llm.notes)
