"""Numpy twins of the ops, the oracle of every shader: `twins.rows.rms_norm` is what `rms_norm.comp` computes.

A twin has its op's name, argument order and push constants; matrix ops that compute the same share one.
Storage arguments are arrays in binding order (weights and rounded activations dequantized, or f16 as stored),
then StepParams if the op reads it, then push and specialization constants by keyword. A twin ignores
constants that change only the speed. Outputs are written in place. Sums and products run in float64 and are
rounded once, to float32.
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
    """The twin of an op; raises NotImplementedError where none is written."""
    name = OPS[op].twin or op
    for family in _FAMILIES:
        if twin := getattr(family, name, None):
            return twin
    raise NotImplementedError(f"vkbackend/twins/ has no {name}, the twin of {op}")
