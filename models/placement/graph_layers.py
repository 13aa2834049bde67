"""Describes a model's layers as a step records them, so that equal layers are recorded once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from vkbackend.buffer import Buffer, View
from vkbackend.meta.expert_slots import views_of_layer
from vkbackend.meta.repeated_layers import Layer
from vkbackend.meta.tensor import Inputs, Weight
from vkbackend.models.architectures.memory_specs import LayerCache, LayerMemory
from vkbackend.models.placement.layout import layer_of


def graph_layers(
    weights: Mapping[str, Weight],
    memories: Sequence[LayerMemory],
    forms: Mapping[str, int],
    alone: Collection[int],
    inputs: Sequence[Inputs],
) -> list[Layer]:
    """Return the layers with their arrays and the inputs of their expert caches. `forms` numbers the layers'
    ops (StepSizes). A layer in `alone` equals no other layer, because its input is kept or rows of images are
    added to its output. Layers with equal keys have equal ops, and arrays of equal formats and shapes on
    equal kinds of memory. Arrays of equal shapes also have equal distances in memory, because one binding of
    a fused product spans two arrays."""
    held: list[list[tuple[str, Weight]]] = [[] for _ in memories]
    for name, weight in weights.items():
        if (il := layer_of(name)) is not None:
            held[il].append((name.split(".", 2)[2], weight))
    layers, n_devices = [], len(inputs)
    for il, (arrays, memory) in enumerate(zip(held, memories, strict=True)):
        section, cached = f"blk.{il}", list(_arrays(memory))
        placed = [[view for _, weight in arrays for view in _views(weight, d)] for d in range(n_devices)]
        in_memory = [[view for _, array in cached for view in _views(array, d)] for d in range(n_devices)]
        stacks = [weight for _, weight in arrays if weight.slots]
        if stacks and stacks[0].slots:
            table = stacks[0].slots.table
            for d, of_device in enumerate(in_memory):
                of_device += views_of_layer(table, stacks, inputs[d], d)
        key = (
            il if il in alone else None,
            forms.get(section),
            [(name, w.dtype, w.shape, w.state, _shapes(w)) for name, w in (*arrays, *cached)],
            [
                [(first, v.shape) for pieces in w.slots.pieces for first, v in pieces]
                for w in stacks
                if w.slots
            ],
            [_distances(of_device) for of_device in placed],
            _traits(memory),
        )
        views = [own + cache for own, cache in zip(placed, in_memory, strict=True)]
        layers.append(Layer(section, key, views))
    return layers


def _arrays(memory: LayerMemory) -> Iterator[tuple[str, Weight]]:
    cache = memory
    if not isinstance(memory, LayerCache):
        yield from memory.arrays.items()
        cache = memory.cache  # type: ignore[assignment]
    if isinstance(cache, LayerCache):
        for name in ("k", "v", "cells", "entry_table", "index", "raw", "kept"):
            if (array := getattr(cache, name)) is not None:
                yield name, array


def _traits(memory: LayerMemory) -> object:
    cache = memory if isinstance(memory, LayerCache) else memory.cache
    return type(memory), cache and (cache.window, cache.shared, cache.first_entry)


def _views(weight: Weight, d: int) -> list[View]:
    views = [view for _, view in weight.pieces[d]]
    return [*views, weight.starts[d]] if d in weight.starts else views


def _shapes(weight: Weight) -> object:
    return [
        [(first, v.shape, v.dtype, v.buffer.home) for first, v in pieces if isinstance(v.buffer, Buffer)]
        for pieces in weight.pieces
    ]


def _distances(views: Sequence[View]) -> list[int | None]:
    """Return each view's distance to the first view of its shape and format, or None if both are in different
    buffers."""
    firsts: dict[object, View] = {}
    distances = []
    for view in views:
        first = firsts.setdefault((view.shape, view.dtype), view)
        distances.append(view.offset - first.offset if view.buffer is first.buffer else None)
    return distances
