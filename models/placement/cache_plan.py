"""Plans the K and V caches of a model.

In a layer with a window, a slot needs window + micro-batch - 1 cells. The first row of a step attends to
`window` positions, including its own, and the last row is micro-batch - 1 positions later. One more block is
needed, because these cells may begin inside a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vkbackend.buffer import Home
from vkbackend.errors import InvalidArgument, UnsupportedModel
from vkbackend.formats import block_of, padded, row_nbytes
from vkbackend.meta.plan import Plan
from vkbackend.meta.policy import Attention, Layer
from vkbackend.meta.split import Ranges, on_holders
from vkbackend.models.architectures.memory_specs import KEPT_ROWS, KVSpec, MemorySpec, kv_of
from vkbackend.models.options import DEFAULT_ROWS, Options
from vkbackend.ops import CELL_BLOCK
from vkbackend.ops.attention_tiles import cells_per_block


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The caches of a layer that does not read the caches of another layer. `arrays` lists (name, head size
    in whole blocks, type) of K, V, index keys and the values from which index keys are pooled. If K has
    entries, `n_entry_blocks` counts the blocks of entries and index keys."""

    layer: int
    spec: KVSpec
    arrays: tuple[tuple[str, int, str], ...]
    heads: Ranges
    width: int  # Blocks of CELL_BLOCK cells for all positions of a slot.
    ring: int  # Blocks that a slot needs at once.
    n_blocks: int
    n_entry_blocks: int
    n_slots: int
    home: Home

    @property
    def n_cells(self) -> int:
        return self.n_blocks * CELL_BLOCK

    @property
    def entry_ring(self) -> int:
        """Return the number of blocks that a slot needs at once for index keys and entries."""
        return self.width if self.spec.entries else self.ring

    def rows_of(self, name: str) -> int:
        """Return the number of rows of an array."""
        n_entries = self.n_entry_blocks * cells_per_block(self.spec.block)
        if name == "index":
            return n_entries
        return self.n_cells + (n_entries if name == "k" and self.spec.entries else 0)

    @property
    def window(self) -> int:
        """Return how many positions a row attends to, or 0 for all. If a window's blocks cover the context,
        return 0."""
        return self.spec.window if self.ring < self.width else 0

    def heads_of(self, name: str) -> Ranges:
        """Return which heads of the array `name` each device holds. Every device with kv heads has all index
        keys."""
        return on_holders(self.heads) if name in ("index", "raw") else self.heads

    def n_heads(self, name: str) -> int:
        return 1 if name in ("index", "raw") else self.spec.n_head_kv

    def nbytes(self, device: int) -> list[int]:
        nbytes = []
        for name, width, dtype in self.arrays:
            begin, end = self.heads_of(name)[device]
            nbytes.append(self.rows_of(name) * row_nbytes(dtype, (end - begin) * width))
        return [*nbytes, 4 * math.prod(self.kept)] if self.spec.n_kept else nbytes

    @property
    def kept(self) -> tuple[int, int, int]:
        """Return the shape of the rows that are kept for each slot's last positions. Every device holds all
        of these rows."""
        return self.n_slots, KEPT_ROWS, self.spec.n_kept


def plan_caches(
    specs: Sequence[MemorySpec], plans: Sequence[Plan], homes: Sequence[Home], options: Options
) -> list[CachePlan]:
    """Return the plans of layers with their own caches."""
    return [
        _planned(il, spec, plans[il].ranges[spec.dim], homes[il], options)
        for il, spec in enumerate(map(kv_of, specs))
        if spec and spec.owner is None
    ]


def resized(caches: Sequence[CachePlan], options: Options) -> list[CachePlan]:
    """Return the plans with the context, cells, slots and types of `options`. Raises InvalidArgument."""
    return [_planned(c.layer, c.spec, c.heads, c.home, options) for c in caches]


def _planned(il: int, spec: KVSpec, heads: Ranges, home: Home, options: Options) -> CachePlan:
    ring = blocks_per_slot(spec.window, options)
    width, n = blocks_per_slot(0, options), n_blocks(ring, options)
    n_of_entries = n_blocks(width, options) if spec.entries else n
    arrays = _arrays(spec, options)
    return CachePlan(il, spec, arrays, heads, width, ring, n, n_of_entries, options.n_slots, home)


def _arrays(spec: KVSpec, options: Options) -> tuple[tuple[str, int, str], ...]:
    """Devices split a cache between heads, so each head has whole quantization blocks."""
    arrays = [("k", spec.head_dim_k, options.type_k)]
    if spec.head_dim_v:
        arrays.append(("v", spec.head_dim_v, options.type_v))
    if spec.index_dim:
        arrays.append(("index", spec.index_dim, options.type_k))
    if spec.raw_dim:
        arrays.append(("raw", spec.raw_dim, raw_type(options.type_k)))
    return tuple((name, padded(width, dtype), dtype) for name, width, dtype in arrays)


def raw_type(type_k: str) -> str:
    """Return the type of the values from which index keys are pooled. It is never a quantized type."""
    return type_k if block_of(type_k)[0] == 1 else "f16"


def layout_of(options: Options) -> dict[str, str]:
    """Return the cache types and the rotation of quantized caches (meta/ops/dense_attention.py). Saved states
    and block files depend on these values and on the model's fingerprint."""
    types = {"type_k": options.type_k, "type_v": options.type_v}
    quantized = any(block_of(dtype)[0] > 1 for dtype in types.values())
    return types | ({"rotation": "hadamard32"} if quantized else {})


def blocks_per_slot(window: int, options: Options) -> int:
    whole, rows = -(-options.n_ctx // CELL_BLOCK), options.n_ubatch or DEFAULT_ROWS
    return min(whole, -(-(window + rows - 2) // CELL_BLOCK) + 1) if window else whole


def n_blocks(ring: int, options: Options) -> int:
    """Raises InvalidArgument if one sequence needs more blocks than all slots have."""
    most, whole = ring * options.n_slots, blocks_per_slot(0, options)
    if options.kv_cells is None or ring < whole:
        return most
    if options.kv_cells < options.n_ctx:
        raise InvalidArgument(
            f"a KV cache of {options.kv_cells} cells (kv_cells, --kv-cells) cannot hold one sequence of "
            f"{options.n_ctx} tokens; give at least {options.n_ctx}, or a smaller context (-c)"
        )
    return min(most, -(-options.kv_cells // CELL_BLOCK))


def blocks_of_owners(layers: Sequence[Layer], specs: Sequence[MemorySpec]) -> list[Layer]:
    """Some layers read another layer's cache or choice of positions. Set that layer's quantization block to
    the largest among these layers, so that one split suits all of them."""
    units = list(layers)
    for il, spec in enumerate(specs):
        if isinstance(spec, KVSpec) and (leader := spec.leader) is not None:
            reader, owned, owner = layers[il].attention, units[leader].attention, specs[leader]
            assert isinstance(owner, KVSpec) and owner.leader is None and leader < il, (
                f"layer {il} has no owner's cache"
            )
            assert isinstance(reader, Attention) and isinstance(owned, Attention), (reader, owned)
            heads = [(a.n_head, a.n_head_kv, a.head_dim_k, a.head_dim_v) for a in (reader, owned)]
            if heads[0] != heads[1]:
                kind = "cache" if spec.owner is not None else "choice"
                raise UnsupportedModel(
                    f"layer {il} reads the {kind} of layer {leader}, but their heads differ: (q, kv, sizes "
                    f"of k and v) are {heads[0]} and {heads[1]}"
                )
            larger = max(reader.block, owned.block)
            units[leader] = replace(units[leader], attention=replace(owned, block=larger))
    return units


def heads_of_owners(plans: Sequence[Plan], specs: Sequence[MemorySpec]) -> list[Plan]:
    """Layers that read another layer's cache or choice of positions get that layer's head ranges."""
    return [
        replace(plan, ranges={**plan.ranges, **_heads(plans[spec.leader])})
        if isinstance(spec, KVSpec) and spec.leader is not None
        else plan
        for plan, spec in zip(plans, specs, strict=True)
    ]


def _heads(plan: Plan) -> dict[str, Ranges]:
    return {dim: plan.ranges[dim] for dim in ("heads", "kv_heads")}
