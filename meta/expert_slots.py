"""An expert cache. A layer's experts are in host memory, and slots in device memory hold copies of some of
them.

Every device holds its slices of the experts in slots, and copies the slices over its own bus. A table per
layer maps experts to slots. The tables are part of a step's inputs, so a recorded step never changes. The
layer's router counts how often each expert is used, in host-visible memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vkbackend.buffer import View
from vkbackend.formats import block_of
from vkbackend.meta.slices import Load, expert_slices
from vkbackend.meta.tensor import Inputs, SlotStack, SlotTable, Weight
from vkbackend.ops.moe import MAX_EXPERTS

MAX_LAYER_SLOTS = MAX_EXPERTS // 2  # Slots need two ids if experts have different widths.


def widths(load: Load, d: int) -> list[int]:
    """Return how many FFN columns of each expert device `d` holds."""
    by_columns = load.state.axis == 2
    return [cut[by_columns].stop - cut[by_columns].start for cut in expert_slices(load, d)]


def column_nbytes(load: Load) -> float:
    """Return the bytes of an expert's matrix per FFN column."""
    elements, nbytes = block_of(load.dtype)
    return load.shape[1 if load.state.axis == 2 else 2] / elements * nbytes


def slot_nbytes(load: Load, d: int) -> int:
    return int(max(widths(load, d)) * column_nbytes(load))


def slot_pieces(load: Load, d: int, n_slots: int, max_range: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return (first slot, shape) of each piece of the slots. A piece has at most `max_range` bytes. Shapes
    are as in `expert_pieces`, and each slot has room for the widest expert."""
    width = max(widths(load, d))
    if not width:
        return []
    step = max(1, max_range // slot_nbytes(load, d))
    n_out, n_in = load.shape[1:]
    pieces: list[tuple[int, tuple[int, ...]]] = []
    for first in range(0, n_slots, step):
        columns = min(step, n_slots - first) * width
        pieces.append((first, (n_out, columns) if load.state.axis == 2 else (columns, n_in)))
    return pieces


def cacheable(loads: Sequence[Load], n_devices: int) -> dict[str, list[Load]]:
    """Return the stacks of experts by layer ("blk.3."). An expert must be a multiple of 4 bytes on every
    device, because devices copy words."""
    layers: dict[str, list[Load]] = {}
    for load in loads:
        layers.setdefault(prefix_of(load.name), []).append(load)
    return {
        prefix: stacks
        for prefix, stacks in layers.items()
        if not any(
            width * column_nbytes(load) % 4
            for load in stacks
            for d in range(n_devices)
            for width in widths(load, d)
        )
    }


def prefix_of(name: str) -> str:
    """Return "blk.3." for "blk.3.ffn_up_exps.weight"."""
    return ".".join(name.split(".")[:2]) + "."


def tables_of(layers: Mapping[str, Sequence[Load]], n_devices: int, n_slots: int) -> dict[str, SlotTable]:
    """Return the position of each layer's table in a step's inputs. A layer has up to `n_slots` slots."""
    tables: dict[str, SlotTable] = {}
    at = counts_at = 0
    for prefix, stacks in layers.items():
        n_experts = stacks[0].shape[0]
        held = [widths(stacks[0], d) for d in range(n_devices)]
        strides = tuple(1 if min(of_device) == max(of_device) else 2 for of_device in held)
        n = min(n_slots, n_experts, MAX_LAYER_SLOTS)
        tables[prefix] = SlotTable(n_experts, n, strides, at, counts_at)
        at += tables[prefix].n_words
        counts_at += tables[prefix].n_counts
    return tables


def slot_views(
    layers: Mapping[str, Sequence[Load]], tables: Mapping[str, SlotTable], d: int, max_range: int
) -> list[tuple[tuple[int, ...], str]]:
    """Return (shape, type) of all pieces of slots on device `d`, in the order of allocation."""
    return [(shape, load.dtype) for load, _, shape in _pieces(layers, tables, d, max_range)]


def views_of_layer(table: SlotTable, stacks: Sequence[Weight], inputs: Inputs, d: int) -> list[View]:
    """Return a layer's slots, its table and its counts on device `d`, in an order that equal layers share."""
    slots = [view for weight in stacks if weight.slots for _, view in weight.slots.pieces[d]]
    tables, counts = inputs.experts, inputs.counts
    assert tables and counts
    views = [View(tables.buffer, tables.offset + 4 * table.at, (table.n_words,), "u32")]
    for half in range(2):
        at = counts.offset + 4 * (half * counts.shape[1] + table.counts_at)
        views.append(View(counts.buffer, at, (table.n_counts,), "u32"))
    return [*slots, *views]


def attach_slots(
    weights: Mapping[str, Weight],
    layers: Mapping[str, Sequence[Load]],
    tables: Mapping[str, SlotTable],
    max_ranges: Sequence[int],
    views_of: Callable[[int, list[tuple[tuple[int, ...], str]]], list[View]],
) -> None:
    """Attach slots to each stack. `views_of` returns device d's memory for `slot_views`."""
    for prefix, table in tables.items():
        for load in layers[prefix]:
            weights[load.name].slots = SlotStack(table, [[] for _ in max_ranges])
    for d, max_range in enumerate(max_ranges):
        pieces = _pieces(layers, tables, d, max_range)
        views = views_of(d, [(shape, load.dtype) for load, _, shape in pieces]) if pieces else []
        for (load, first, _), view in zip(pieces, views, strict=True):
            slots = weights[load.name].slots
            assert slots
            slots.pieces[d].append((first, view))


def _pieces(
    layers: Mapping[str, Sequence[Load]], tables: Mapping[str, SlotTable], d: int, max_range: int
) -> list[tuple[Load, int, tuple[int, ...]]]:
    return [
        (load, first, shape)
        for prefix, table in tables.items()
        for load in layers[prefix]
        for first, shape in slot_pieces(load, d, table.n_slots, max_range)
    ]
