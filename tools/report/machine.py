"""Describe the machine and its devices without anything that identifies the owner."""

from __future__ import annotations

import os
import platform
import re
from typing import Any

from vkbackend.device_info import DeviceInfo
from vkbackend.system import memory, processors
from vkbackend.tools.console import size

PRIVATE = ("uuid", "driver_uuid")  # A card's serial number identifies its owner.


def chosen(words: tuple[str, ...] | None) -> list[dict[str, Any]]:
    """Return the named devices. The default is all GPUs, or all devices without a GPU. Raises
    InvalidArgument, UnsupportedFeature."""
    from vkbackend.tools.flags.present import present  # needs the Vulkan loader
    from vkbackend.vulkan.instance import select

    infos = present()
    if words is None:
        wanted = [info for info in infos if not info.is_cpu] or infos
    else:
        named = [select(word, infos) for word in words]
        wanted = [info for info in infos if info in named]
    return [of_device(info) for info in wanted]


def of_device(info: DeviceInfo) -> dict[str, Any]:
    return {name: value for name, value in info.to_json().items() if name not in PRIVATE}


def machine() -> dict[str, Any]:
    values: dict[str, Any] = {"cores": os.cpu_count(), "python": platform.python_version()}
    version = re.match(r"[\d.]*", platform.release())  # without the builder's name
    values["system"] = f"{platform.system()} {version and version[0]} {platform.machine()}"
    if name := processors.name():
        values["processor"] = name
    if nbytes := memory.total_nbytes():
        values["memory"] = size(nbytes)
    return values
