"""Numpy twins of the ops, the oracle of every shader: `twins.rows.rms_norm` is the twin of `rms_norm.comp`.

A twin has the name, argument order and push constants of its op; the recorder's method has the formula. Equal
matrix ops share a twin. Arguments are storage arrays in binding order (weights and activations dequantized,
or f16 as stored), StepParams if the op reads them, then push and specialization constants by keyword. Outputs
are written in place. Twins compute in float64, round once to float32, and ignore constants that affect only
speed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from vkbackend.ops.table import OPS
from vkbackend.twins import (
    attention,
    chosen,
    elementwise,
    half,
    heads,
    matrix,
    moe,
    quantized,
    recurrent,
    rows,
    state_space,
    streams,
)

_FAMILIES = (
    *(attention, chosen, elementwise, half, heads, matrix, moe, quantized, recurrent, rows),
    *(state_space, streams),
)


@cache
def twin_of(op: str) -> Callable[..., None]:
    """Return the twin of an op, or raise NotImplementedError."""
    name = OPS[op].twin or op
    for family in _FAMILIES:
        if twin := getattr(family, name, None):
            return twin
    raise NotImplementedError(f"vkbackend/twins/ has no {name}, the twin of {op}")
