"""Descriptions of devices (cards) that nodes exchange, and hashes that nodes compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields

import numpy as np

from vkbackend import env
from vkbackend.limits import Limits, MatrixUnits
from vkbackend.meta.elsewhere import Card, HeapCard, PhysicalCard
from vkbackend.meta.speed import measure_speed
from vkbackend.models.hosts import node_messages
from vkbackend.rope import RopeTable
from vkbackend.runtime import Device


def card_data(device: Device, speeds: bool) -> node_messages.CardData:
    info = device.physical
    physical = None
    if info:
        heaps = [node_messages.HeapData(h.nbytes, h.device_local, h.budget) for h in info.heaps]
        ids = info.name[:256], info.uuid, info.vendor, info.driver[:256], info.driver_version[:256]
        physical = node_messages.PhysicalData(*ids, info.is_cpu, heaps)
    speed = measure_speed(device) if speeds else None
    return node_messages.CardData(
        device.name,
        limits_data(device.limits),
        device.imports_pages,
        device.has_codebooks,
        device.free_nbytes(),
        physical,
        (speed.weights, speed.host) if speed else None,
    )


def limits_data(limits: Limits) -> node_messages.LimitsData:
    values = {f.name: getattr(limits, f.name) for f in fields(Limits)}
    values |= {
        "choices": [(row, list(ops)) for row, ops in limits.choices],
        "matrix_units": tuple(limits.matrix_units),
        "features": sorted(limits.features),
    }
    return node_messages.LimitsData(**values)


def card_of(node: str, data: node_messages.CardData) -> Card:
    """Add the node to the UUID, because devices of two nodes may have the same UUID."""
    values = {f.name: getattr(data.limits, f.name) for f in fields(Limits)}
    values |= {
        "max_groups": tuple(data.limits.max_groups),
        "choices": tuple((row, tuple(ops)) for row, ops in data.limits.choices),
        "matrix_units": MatrixUnits(*data.limits.matrix_units),
        "features": frozenset(data.limits.features),
    }
    physical = None
    if p := data.physical:
        heaps = tuple(HeapCard(h.nbytes, h.device_local, h.budget) for h in p.heaps)
        physical = PhysicalCard(
            p.name, f"{node}/{p.uuid}", p.vendor, p.driver, p.driver_version, p.is_cpu, heaps
        )
    return Card(
        data.name, Limits(**values), data.imports_pages, data.has_codebooks, data.free, physical, data.speed
    )


def settings() -> str:
    """Return environment variables that change recorded steps."""
    words = {
        "fuse": env.fusing(),
        "exact": env.exact(),
        "floor": env.floor(),
        "as_gpu": env.as_gpu(),
        "off": sorted(env.disabled()),
    }
    return json.dumps(words)


def hash_of(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def tables_hash(ropes: Mapping[str, RopeTable], n_ctx: int) -> str:
    digest = hashlib.sha256()
    for name in sorted(ropes):
        for begin in range(0, n_ctx, 4096):
            rows = ropes[name].rows(np.arange(begin, min(begin + 4096, n_ctx)))
            digest.update(np.ascontiguousarray(rows).data)
    return digest.hexdigest()[:16]
