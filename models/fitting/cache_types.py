"""Lists the types of the K and V cache that `--fit` tries."""

from __future__ import annotations

from collections.abc import Collection

from vkbackend.formats import block_of
from vkbackend.models.architectures.base import Model
from vkbackend.models.architectures.memory_specs import kv_of
from vkbackend.models.options import Options

TYPES = "f16", "q8_0", "q4_0"  # the most precise first


def cache_types(model: Model, options: Options, chosen: Collection[str]) -> list[tuple[str, str]]:
    """Return (type_k, type_v) of the caches to try. A type that is not in `chosen` stays as in `options`.
    Heads of some models fit no quantized block; these models keep the first pair."""
    pairs = [
        (
            name if "type_k" in chosen else options.type_k,
            name if "type_v" in chosen else options.type_v,
        )
        for name in TYPES
    ]
    first, *others = dict.fromkeys(pairs)
    return [first, *(pair for pair in others if _fits_heads(model, *pair))]


def _fits_heads(model: Model, type_k: str, type_v: str) -> bool:
    specs = [spec for il in range(model.n_layer) if (spec := kv_of(model.kv(il)))]
    widths = [
        pair
        for spec in specs
        for pair in ((spec.head_dim_k, type_k), (spec.head_dim_v, type_v), (spec.index_dim, type_k))
    ]
    return not any(width % block_of(dtype)[0] for width, dtype in widths)
