from __future__ import annotations

from dataclasses import dataclass, field

from vkbackend.ops import CELL_BLOCK


@dataclass(frozen=True, slots=True)
class Pool:
    """A number of cache blocks for one group of layers. A row of these layers attends to the last `window`
    positions, or to all positions if `window` is 0."""

    n_blocks: int
    window: int = 0

    @property
    def seen(self) -> int:
        """Return the number of earlier blocks to which the first row of a block may attend. 0 means all
        blocks."""
        return -(-(self.window - 1) // CELL_BLOCK) if self.window else 0


@dataclass(slots=True)
class SlotContent:
    """The content of a slot. The cache has K and V of `tokens[:n_stored]`. `tokens` may end with one more
    token, whose K and V are not computed yet.

    A sequence can continue this content from position `resumable` or any later position. A layer with a
    window of w positions has K and V from position `resumable` - w + 1 on. If `resumable` is 0, the layer has
    K and V of all positions.
    """

    tokens: list[int] = field(default_factory=list)
    n_stored: int = 0
    resumable: int = 0


@dataclass(slots=True)
class Usage:
    """Counts the blocks of the first layer group, and prompt tokens."""

    n_blocks: int
    free: int
    cached: int  # Blocks in the prefix tree that no slot uses.
    shared: int = 0  # Blocks that several slots use.
    prompt_tokens: int = 0
    shared_tokens: int = 0  # prompt tokens whose K and V came from the cache

    def stats(self) -> dict[str, float]:
        """Return these counts for `LLM.stats`, in cells instead of blocks."""
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
