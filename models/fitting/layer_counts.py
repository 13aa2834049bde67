"""Finds the number of layers per device, in split mode "layer", with which the longest context fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vkbackend.buffer import Home
from vkbackend.meta.balance import Shares
from vkbackend.models.fitting.sized_layout import SizedLayout, most_tokens
from vkbackend.models.placement.fit import Budget
from vkbackend.models.placement.layout import layer_of, weight_nbytes, with_caches_of


def layer_counts(sized: SizedLayout, budgets: Sequence[Budget], most: int) -> Shares | None:
    """Return the number of layers of each device with which the longest context fits. The output counts as a
    layer. Every device takes as many of the next layers as fit. Return None if no context fits, or if a
    device has no budget of its own in `budgets`."""
    n = sized.layout.n_devices
    rooms = [min((b.nbytes for b in budgets if b.members == (d,)), default=0) for d in range(n)]
    if not all(rooms):
        return None
    weights = [0] * (len(sized.layout.plans) + 1)
    for load in sized.layout.loads:
        if load.home is Home.WEIGHTS and load.state.ranges:
            il = layer_of(load.name)
            weights[-1 if il is None else il] += sum(weight_nbytes(load, d) for d in range(n))
    # Mirrored tensors, tables and scratch are on every device.
    on_device = [held.homes["weights"] + held.homes["scratch"] for held in sized.fixed]
    rest = max(0, (sum(on_device) - sum(weights)) // n)

    def counts(n_ctx: int) -> list[int] | None:
        nbytes = list(weights)
        for cache in with_caches_of(sized.layout, replace(sized.options, n_ctx=n_ctx)).memories():
            nbytes[cache.layer] += sum(sum(cache.nbytes(d)) for d in range(n))
        taken, d, left = [0] * n, 0, rooms[0] - rest
        for of_layer in nbytes:
            while of_layer > left:
                if (d := d + 1) == n:
                    return None
                left = rooms[d] - rest
            left -= of_layer
            taken[d] += 1
        return taken

    n_ctx = most_tokens(most, lambda tokens: counts(tokens) is not None)
    best = counts(n_ctx) if n_ctx else None
    return None if best is None else tuple(map(float, best))
