"""The fastest matrix ops per driver, measured by `vkbackend tune` and stored in the cache folder.

There is one table per driver version, because all devices of a driver must run the same ops for identical
bits. A table ranks all ops per class of rows; a device uses the first that it supports for the weight type
(choice.py). Without a table, table.py decides.
"""

from __future__ import annotations

import hashlib

from vkbackend import cache_folder
from vkbackend.device_info import DeviceInfo
from vkbackend.ops.matrix import ROW_CLASSES
from vkbackend.ops.table import MATRIX_OPS

CANDIDATES = {rows: tuple(op.name for op in MATRIX_OPS.values() if rows in op.rows) for rows in ROW_CLASSES}
Table = dict[str, tuple[str, ...]]  # class of rows -> ops, fastest first
_FORMAT = 3


def entry_name(info: DeviceInfo) -> str:
    identity = repr((info.vendor, info.driver, info.driver_uuid, info.driver_version)).encode()
    return f"choices-{hashlib.sha256(identity).hexdigest()[:16]}.json"


def load(info: DeviceInfo) -> Table:
    """Return the measured table without unknown ops; empty if missing."""
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
    """Replace the driver's table, or remove it if `table` is empty. Return False if it cannot be written."""
    name = entry_name(info)
    if not table:
        cache_folder.remove(name)
        return True
    driver = f"{info.driver} {info.driver_version}"
    return cache_folder.write_json(name, {"format": _FORMAT, "driver": driver, "ops": table})
