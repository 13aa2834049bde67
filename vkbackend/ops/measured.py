"""Stores the order of matrix ops by speed in the cache folder, as `vkbackend tune` measured it.

Each driver version has one table, so all devices of a driver run the same ops and compute identical bits. A
device uses the first op that it supports for the weight type (choice.py).
"""

from __future__ import annotations

import hashlib

from vkbackend import cache_folder
from vkbackend.device_info import DeviceInfo
from vkbackend.ops.matrix import ROW_CLASSES
from vkbackend.ops.table import MATRIX_OPS

CANDIDATES = {rows: tuple(op.name for op in MATRIX_OPS.values() if rows in op.rows) for rows in ROW_CLASSES}
Table = dict[str, tuple[str, ...]]  # the ops of each class of row counts, fastest first
_FORMAT = 3


def entry_name(info: DeviceInfo) -> str:
    identity = repr((info.vendor, info.driver, info.driver_uuid, info.driver_version)).encode()
    return f"choices-{hashlib.sha256(identity).hexdigest()[:16]}.json"


def load(info: DeviceInfo) -> Table:
    """Return the driver's table, without ops that this version lacks. The table is empty if nothing was
    measured."""
    try:
        stored = cache_folder.read_json(entry_name(info)) or {}
        table = stored["ops"] if stored.get("format") == _FORMAT else {}
        known = {
            name: tuple(op for op in table.get(name, ()) if op in CANDIDATES[name]) for name in ROW_CLASSES
        }
        return {name: ops for name, ops in known.items() if ops}
    except (KeyError, TypeError, AttributeError):
        return {}


def save(info: DeviceInfo, table: Table) -> bool:
    """Replace the driver's table, or remove it if `table` is empty. Return False if the cache folder is not
    writable."""
    name = entry_name(info)
    if not table:
        cache_folder.remove(name)
        return True
    driver = f"{info.driver} {info.driver_version}"
    return cache_folder.write_json(name, {"format": _FORMAT, "driver": driver, "ops": table})
