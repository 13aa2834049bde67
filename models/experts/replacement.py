"""Chooses which experts an expert cache replaces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkbackend.meta.expert_slots import Move
from vkbackend.models.experts.uses import Uses

# A copy moves an expert over the bus once, as a miss does. So an expert must be ahead by more uses than that.
MARGIN = 2.0


def most_used(uses: Uses, n_slots: Sequence[int]) -> list[list[int]]:
    """Return the most used experts of each layer. Of equally used experts, the first are taken."""
    return [
        np.argsort(-held, kind="stable")[:n].tolist() for held, n in zip(uses.of_layers, n_slots, strict=True)
    ]


def replacements(uses: Uses, resident: Sequence[np.ndarray], most: int, margin: float = MARGIN) -> list[Move]:
    """Return at most `most` moves, one per layer. `resident[layer]` lists each slot's expert, or -1. The most
    used expert without a slot replaces the least used expert in a slot, if it has over `margin` more uses."""
    gains: list[tuple[float, Move]] = []
    for layer, (held, slots) in enumerate(zip(uses.of_layers, resident, strict=True)):
        if len(slots) == len(held) and (slots >= 0).all():
            continue
        scores = np.where(slots >= 0, held[slots], -margin - 1.0)
        slot = int(scores.argmin())
        outside = held.copy()
        outside[slots[slots >= 0]] = -1.0
        expert = int(outside.argmax())
        gain = float(outside[expert] - scores[slot])
        if outside[expert] >= 0 and gain > margin:
            gains.append((gain, Move(layer, slot, expert)))
    gains.sort(key=lambda item: -item[0])
    return [move for _, move in gains[:most]]
