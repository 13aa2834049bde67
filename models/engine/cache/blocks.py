from __future__ import annotations

from dataclasses import dataclass, field

from vkbackend.models.engine.cache.mark import Mark
from vkbackend.ops import CELL_BLOCK


@dataclass(frozen=True, slots=True)
class Pool:
    """Cache blocks of a layer group. A row attends to `window` positions, or to all if `window` is 0."""

    n_blocks: int
    window: int = 0

    @property
    def seen(self) -> int:
        """Return how many earlier blocks the first row of a block attends to, or 0 for all."""
        return -(-(self.window - 1) // CELL_BLOCK) if self.window else 0


@dataclass(slots=True)
class SlotContent:
    """The cache holds K and V of `tokens[:n_stored]`. `tokens` may end with one more token, which has not
    run.

    A sequence can continue from position `resumable` or later. A layer with a window w holds K and V from
    position `resumable` - w + 1 on, or of all positions if `resumable` is 0.
    """

    tokens: list[int] = field(default_factory=list)
    n_stored: int = 0
    resumable: int = 0
    mark: Mark = ()  # the adapters that computed the positions


@dataclass(slots=True)
class Usage:
    n_blocks: int
    free: int
    cached: int  # Blocks in the prefix tree that no slot uses.
    shared: int = 0  # Blocks that several slots use.
    prompt_tokens: int = 0
    shared_tokens: int = 0

    def stats(self) -> dict[str, float]:
        return {
            "cells": self.n_blocks * CELL_BLOCK,
            "cells_used": (self.n_blocks - self.free - self.cached) * CELL_BLOCK,
            "cells_cached": self.cached * CELL_BLOCK,
            "cells_shared": self.shared * CELL_BLOCK,
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_cached": self.shared_tokens,
            "hit_rate": self.shared_tokens / self.prompt_tokens if self.prompt_tokens else 0.0,
        }


@dataclass(slots=True)
class Copy:
    """A block that must be copied before a slot writes to it."""

    group: int
    source: int
    target: int
