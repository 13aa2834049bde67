"""Lists the types of the K and V cache that `--fit` tries."""

from __future__ import annotations

from collections.abc import Collection

from vkbackend.formats import padded, row_nbytes
from vkbackend.models.architectures.base import Model
from vkbackend.models.architectures.memory_specs import kv_of
from vkbackend.models.options import Options
from vkbackend.models.placement.cache_plan import raw_type

TYPES = "f16", "q8_0", "q5_1", "q5_0", "q4_0"  # the most precise first


def cache_types(model: Model, options: Options, chosen: Collection[str]) -> list[tuple[str, str]]:
    """Return (type_k, type_v) of the caches to try. A type that is not in `chosen` stays as in `options`. A
    type that needs as many bytes as the type before is omitted; small heads do not fill a quantized block."""
    pairs = [
        (
            name if "type_k" in chosen else options.type_k,
            name if "type_v" in chosen else options.type_v,
        )
        for name in TYPES
    ]
    kept = [pairs[0]]
    for pair in pairs[1:]:
        if _nbytes(model, *pair) < _nbytes(model, *kept[-1]):
            kept.append(pair)
    return kept


def _nbytes(model: Model, type_k: str, type_v: str) -> int:
    """Return the number of bytes of a position in the caches of all layers."""
    specs = [spec for il in range(model.n_layer) if (spec := kv_of(model.kv(il))) and spec.owner is None]
    widths = [
        (n, head, dtype)
        for spec in specs
        for n, head, dtype in (
            (spec.n_head_kv / (spec.block if spec.entries else 1), spec.head_dim_k, type_k),
            (spec.n_head_kv, spec.head_dim_v, type_v),
            (1 / spec.block, spec.index_dim, type_k),
            (0 if spec.entries else 1, spec.raw_dim, raw_type(type_k)),
        )
    ]
    return sum(int(n * row_nbytes(dtype, padded(head, dtype))) for n, head, dtype in widths)
