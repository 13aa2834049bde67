"""Experts are chosen by counts only."""

from __future__ import annotations

import numpy as np
import pytest

from vkbackend.meta.expert_moves import Move
from vkbackend.models.experts.replacement import most_used, replacements
from vkbackend.models.experts.uses import Uses

pytestmark = pytest.mark.no_vulkan


def uses_of(*layers: list[float]) -> Uses:
    uses = Uses([f"blk.{i}." for i in range(len(layers))], [len(held) for held in layers])
    uses.flat[:] = np.concatenate(layers)
    return uses


def test_earlier_uses_count_half_after_the_half_life() -> None:
    uses = Uses(["blk.0."], [2], half_life=8)
    uses.add(np.array([4, 0]), 8)
    uses.add(np.array([0, 1]), 4)
    uses.add(np.array([0, 0]), 4)
    assert uses.flat == pytest.approx([2, 2**-0.5])


def test_most_used() -> None:
    assert most_used(uses_of([1, 5, 3, 5], [0, 0, 0]), [3, 2]) == [[1, 3, 2], [0, 1]]


def test_an_expert_replaces_the_least_used_one_if_it_is_ahead_by_more_than_the_margin() -> None:
    uses = uses_of([9, 1, 6, 3], [0, 5, 0, 0])
    resident = [np.array([1, 3]), np.array([1, 2])]
    assert replacements(uses, resident, 8, margin=2) == [Move(0, 0, 0)]
    assert replacements(uses, resident, 8, margin=8) == []
    assert replacements(uses, [np.array([0, 2]), resident[1]], 8) == []


def test_the_largest_gains_come_first_and_empty_slots_are_filled() -> None:
    uses = uses_of([9, 1, 6, 3], [0, 50, 0, 0], [0, 0, 0, 0])
    resident = [np.array([1, 3]), np.array([0, 2]), np.array([3, -1])]
    every = replacements(uses, resident, 8)
    assert every[0] == Move(1, 0, 1) and every[1] == Move(0, 0, 0)
    assert every[2] == Move(2, 1, 0)  # no use is needed
    assert replacements(uses, resident, 1) == every[:1]
    assert replacements(uses, [np.array([3, 2, 1, 0])] * 3, 8) == []
