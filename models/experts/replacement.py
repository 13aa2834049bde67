"""Chooses which experts an expert cache replaces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkbackend.meta.expert_moves import Move
from vkbackend.models.experts.uses import Uses

# A copy transfers an expert over the bus once, as a miss does. An expert must therefore be ahead by more than
# one use.
MARGIN = 2.0


def most_used(uses: Uses, n_slots: Sequence[int]) -> list[list[int]]:
    """Return the most used experts of each layer. Of equally used experts, the first are taken."""
    return [
        np.argsort(-held, kind="stable")[:n].tolist() for held, n in zip(uses.of_layers, n_slots, strict=True)
    ]


def replacements(uses: Uses, resident: Sequence[np.ndarray], most: int, margin: float = MARGIN) -> list[Move]:
    """Return at most `most` moves, one per layer. `resident[layer]` lists each slot's expert, or -1. The most
    used expert without a slot replaces the least used expert in a slot, if it has over `margin` more uses."""
    # First compare all layers at once, because few layers gain.
    n_slots = [len(slots) for slots in resident]
    every = np.concatenate(resident)
    filled = every >= 0
    is_resident = np.zeros(len(uses.flat), bool)
    is_resident[(every + np.repeat(uses.firsts, n_slots))[filled]] = True
    outside = np.where(is_resident, -1.0, uses.flat)
    inside = np.where(is_resident, uses.flat, np.inf)
    best = np.maximum.reduceat(outside, uses.firsts)
    gains = best - np.minimum.reduceat(inside, uses.firsts)
    if not filled.all():
        has_room = [bool((slots < 0).any()) for slots in resident]
        gains[has_room] = best[has_room] + margin + 1
    gains[best < 0] = -np.inf  # all experts of the layer have slots
    moves = []
    for layer in np.argsort(-gains, kind="stable")[:most].tolist():
        if not gains[layer] > margin:
            break
        held, slots = uses.of_layers[layer], resident[layer]
        slot = int(np.where(slots >= 0, held[slots], -1.0).argmin())
        first = uses.firsts[layer]
        moves.append(Move(layer, slot, int(outside[first : first + len(held)].argmax())))
    return moves
