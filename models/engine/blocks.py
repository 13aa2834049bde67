from __future__ import annotations

from dataclasses import dataclass, field

from vkbackend.ops import CELL_BLOCK


@dataclass(frozen=True, slots=True)
class Pool:
    """The blocks of a layer group. A row sees `window` positions (0: all)."""

    n_blocks: int
    window: int = 0

    @property
    def seen(self) -> int:
        """How many earlier blocks the first row of a block may see; 0: all."""
        return -(-(self.window - 1) // CELL_BLOCK) if self.window else 0


@dataclass(slots=True)
class SlotContent:
    """A slot holds K and V of `tokens[:n_stored]`. `tokens` may have one more token, which has not run.

    The sequence can go on from `resumable` or later: layers with a window w have K and V from position
    `resumable` - w + 1 on, or from 0 if `resumable` is 0.
    """

    tokens: list[int] = field(default_factory=list)
    n_stored: int = 0
    resumable: int = 0


@dataclass(slots=True)
class Usage:
    """Counts blocks of the first layer group, and prompt tokens."""

    n_blocks: int
    free: int
    cached: int  # unused, but in the tree
    shared: int = 0  # used by several slots
    prompt_tokens: int = 0
    shared_tokens: int = 0  # prompt tokens taken from the cache

    def stats(self) -> dict[str, float]:
        """Return the counts of `LLM.stats`, in cells instead of blocks."""
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
