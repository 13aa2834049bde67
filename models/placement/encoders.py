"""The options of an encoder, in which a token attends to all others of its text."""

from __future__ import annotations

from dataclasses import replace

from vkbackend.models.architectures.base import Model
from vkbackend.models.options import DEFAULT_ROWS, Options
from vkbackend.models.placement.layout import shares_cache
from vkbackend.models.placement.traced_steps import most_rows
from vkbackend.ops import CELL_BLOCK
from vkbackend.step import MAX_ROWS, MAX_RUNS


def for_encoder(options: Options) -> Options:
    """Return the options of an encoder. A step has room for a text of `n_ctx` tokens, because a token attends
    to all others. Slots hold nothing between steps. So each text of a step gets a slot, and all slots share
    the cells of one step."""
    n_ubatch = min(max(options.n_ubatch or DEFAULT_ROWS, options.n_ctx), MAX_ROWS)
    n_slots = max(options.n_slots, min(MAX_RUNS, n_ubatch // 4 or 1))
    n_cells = max(options.n_ctx, n_ubatch) + n_slots * CELL_BLOCK
    changed = {"n_ubatch": n_ubatch, "n_slots": n_slots, "kv_cells": n_cells}
    return replace(options, **changed, prefix_cache=False, context_shift=False)  # type: ignore[arg-type]


def staged_cells(model: Model, options: Options) -> int:
    """Return the number of cells of the residuals between an encoder's stages, or 0 if every text fits a
    step."""
    if options.n_ctx <= min(options.n_ubatch, most_rows(model)) or not shares_cache(options):
        return 0
    return -(-(options.kv_cells or 0) // CELL_BLOCK) * CELL_BLOCK
