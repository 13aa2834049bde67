"""Checks whether the caches of a model can move to other positions, as a context shift does."""

from __future__ import annotations

from collections.abc import Mapping

from vkbackend.errors import InvalidArgument, UnsupportedModel
from vkbackend.models.architectures.base import Model
from vkbackend.models.architectures.memory_specs import KeyRotation
from vkbackend.models.options import Options
from vkbackend.models.placement.layout import Layout

FLAG = "context_shift (--context-shift)"
LEAST_CONTEXT = 8  # A shift keeps at most n_ctx - 4 tokens, and discards at least one.


def key_rotations(
    model: Model, layout: Layout, options: Options, name: str
) -> Mapping[int, KeyRotation | None]:
    """Return the RoPE of the keys of each layer with its own cache. `name` is the architecture.

    Raises UnsupportedModel if a layer's memory cannot move, and InvalidArgument for a short context.
    """
    if options.n_ctx < LEAST_CONTEXT:
        raise InvalidArgument(
            f"{FLAG} needs a context of at least {LEAST_CONTEXT} tokens, got {options.n_ctx} (-c)"
        )
    if layout.states:
        raise _refused(name, "a recurrent state has no positions to discard")
    for plan in layout.caches:
        if plan.window:
            raise _refused(
                name,
                f"the cache of layer {plan.layer} has only its sliding window of {plan.window} positions",
            )
        if len(plan.arrays) > 2:
            raise _refused(name, "an indexer has keys of its own")
    ropes = model.ropes(options.n_ctx)
    rotations: dict[int, KeyRotation | None] = {}
    for plan in layout.caches:
        try:
            rotations[plan.layer] = rotation = model.key_rotation(plan.layer)
        except UnsupportedModel as error:
            raise _refused(name, str(error)) from None
        if rotation and ropes[rotation.table].sections:
            raise _refused(name, "RoPE has sections (M-RoPE)")
        if rotation and ropes[rotation.table].temperature:
            raise _refused(name, "a key's magnitude depends on its position")
    return rotations


def _refused(name: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{FLAG} is not supported for this model ({name}): {why}; without it, a full context ends the text"
    )
