"""Which matrix ops a driver runs fastest, as measured by `vkbackend tune` and kept in the cache folder.

One table per driver and version, because all devices of a driver must run the same ops to give the same bits.
It has all ops of a class of rows, the fastest first: the first that a device may run and that has the type of
the weights is taken (choice.py). Without a table that goes by rules.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from vkbackend import env
from vkbackend.ops.matrix import ROW_CLASSES
from vkbackend.ops.table import MATRIX_OPS
from vkbackend.shaderlib import write_atomic

if TYPE_CHECKING:
    from vkbackend.vulkan.capabilities import DeviceInfo

CANDIDATES = {rows: tuple(op.name for op in MATRIX_OPS.values() if rows in op.rows) for rows in ROW_CLASSES}
Table = dict[str, tuple[str, ...]]  # class of rows -> ops, the fastest first
_FORMAT = 2


def path_of(info: DeviceInfo) -> Path:
    """Where the table of a device's driver is kept."""
    identity = repr((info.vendor, info.driver, info.driver_uuid, info.driver_version)).encode()
    return env.cache_dir() / f"choices-{hashlib.sha256(identity).hexdigest()[:16]}.json"


def load(info: DeviceInfo) -> Table:
    """The measured choices; empty where there are none, and without what this version does not know."""
    try:
        stored = json.loads(path_of(info).read_text())
        table = stored["ops"] if stored["format"] == _FORMAT else {}
        known = {
            name: tuple(op for op in table.get(name, ()) if op in CANDIDATES[name]) for name in ROW_CLASSES
        }
        return {name: ops for name, ops in known.items() if ops}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def save(info: DeviceInfo, table: Table) -> Path:
    """Replace the driver's table; an empty one removes it."""
    path = path_of(info)
    if table:
        what = {"format": _FORMAT, "driver": f"{info.driver} {info.driver_version}", "ops": table}
        write_atomic(path, json.dumps(what, indent=1).encode())
    else:
        path.unlink(missing_ok=True)
    return path
