"""Numpy twins of the ops. Tests compare each shader with its twin.

The recorder's method of the same name documents the formula. Matrix ops that compute the same product share a
twin. Arguments are arrays in binding order, and StepParams if the op reads them. Quantized arrays are
dequantized first. Push and specialization constants are keywords. Outputs are written in place. Twins compute
in float64, round once to float32, and ignore constants that affect only speed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from vkbackend.ops.table import OPS
from vkbackend.twins import (
    attention,
    chosen,
    elementwise,
    expert_cache,
    half,
    heads,
    kept_rows,
    low_rank,
    matrix,
    moe,
    quantized,
    recurrent,
    rows,
    rwkv,
    state_space,
    streams,
)

_FAMILIES = (
    *(attention, chosen, elementwise, half, heads, matrix, moe, quantized, recurrent, rows),
    *(expert_cache, kept_rows, low_rank, rwkv, state_space, streams),
)


@cache
def twin_of(op: str) -> Callable[..., None]:
    """Return the twin of an op. Raises NotImplementedError if the op has no twin."""
    name = OPS[op].twin or op
    for family in _FAMILIES:
        if twin := getattr(family, name, None):
            return twin
    raise NotImplementedError(f"vkbackend/twins/ has no {name}, the twin of {op}")
