"""Drafts of multi-token prediction heads do not change the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS, product, some, wide
from head_drafts import (
    CHAINS,
    TWO,
    check_choice_on_devices,
    check_common_beginning,
    check_eight_tokens_a_step,
    check_few_blocks,
    check_least_probability,
    same,
    same_for_every_chain,
)
from oracles.fixture import write
from oracles.heads import HEADS, with_good_head, with_head

from vkbackend.models.drafting.drafter import Want
from vkbackend.models.drafting.heads import HeadDrafter

MTP = {"speculation": "mtp"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


def model(folder: Path, name: str, gain: float | None) -> Path:
    """Return a model whose head is often right. Without a gain, the head is random."""
    path = folder / f"{name}-{gain}.gguf"
    if not path.exists():
        write(with_head(name) if gain is None else with_good_head(name, gain), path)
    return path


# Random heads run on two devices. Heads that are often right run on one device and on two.
HOW = [
    pytest.param(None, TWO, id="random-2"),
    pytest.param(0.1, TWO[:1], id="0.1-1"),
    pytest.param(0.3, TWO, id="0.3-2"),
]


@pytest.mark.wide
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(("gain", "devices"), HOW)
def test_every_head_and_chain(folder: Path, name: str, gain: float | None, devices: list[str]) -> None:
    drafted = same_for_every_chain(model(folder, name, gain), devices, MTP)
    assert drafted.n_accepted > 0 or gain != 0.1


ON_VULKAN = [p for p in DEVICE_SETS if p.id in ("0", "0,0")]


@pytest.mark.wide
@pytest.mark.parametrize(("name", "devices"), product(["glm4moe", "qwen35"], ON_VULKAN))
def test_tokens_on_vulkan(folder: Path, name: str, devices: list[str]) -> None:
    same(model(folder, name, 0.2), devices, CHAINS[:1], MTP, n=12)


@pytest.mark.parametrize("name", some(HEADS, 11))
def test_a_right_head_gives_eight_tokens_a_step(folder: Path, name: str) -> None:
    """A draft exchanges two sums, or one sum if the model adds the results of attention and experts
    together."""
    plain, drafted = check_eight_tokens_a_step(model(folder, name, 0.0), MTP)
    of_drafts = 20 * (1 if name.startswith("cohere2moe") else 2)
    assert drafted.n_reduces == plain.n_reduces // 24 * 4 + of_drafts


def test_few_blocks_and_random_heads(folder: Path) -> None:
    check_few_blocks(model(folder, "glm4moe", None), MTP)


def test_sequences_with_a_common_beginning(folder: Path) -> None:
    check_common_beginning(model(folder, "glm4moe", 0.3), MTP)


def test_a_least_probability_ends_drafts(folder: Path) -> None:
    check_least_probability(model(folder, "glm4moe", 0.3), MTP)


@pytest.mark.parametrize("devices", [wide(pytest.param(TWO[:1])), TWO])
def test_devices_choose_the_drafted_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str]
) -> None:
    check_choice_on_devices(model(folder, "glm4moe", None), devices, MTP, monkeypatch)


def test_the_time_of_a_drafted_token_is_learned() -> None:
    class Slow:
        is_idle, now, took = True, 0.0, 8.0

        def draft(self, tokens: list[int], *_: Any) -> tuple[np.ndarray, None]:
            self.now += self.took
            return np.array(tokens), None

    head = Slow()
    drafter = HeadDrafter(head, clock=lambda: head.now)
    wants = [Want(slot, slot, [1], [1], 1) for slot in (0, 1)]
    drafter.draft(wants)  # The step is recorded.
    assert drafter.seconds == 0
    for head.took in (2.0, 4.0, 3.0):
        drafter.draft(wants)
        assert drafter.seconds == 2.0, "the least recent time"
    drafter.draft(wants[:1])
    assert drafter.seconds == 2.0


def test_a_busy_runner_gets_no_drafts() -> None:
    class Busy:
        is_idle = False

    drafter = HeadDrafter(Busy())  # type: ignore[arg-type]
    assert [list(d.tokens) for d in drafter.draft([Want(0, 0, [1], [1], 3)])] == [[]]
