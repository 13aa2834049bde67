from __future__ import annotations

import importlib.util
import sys

from vkbackend import env
from vkbackend.device_info import DeviceInfo
from vkbackend.errors import InvalidArgument, UnsupportedFeature
from vkbackend.runtime import Device

RUNTIMES = ("native", "kompute")


def runtime_of(name: str | None) -> str:
    """Return `name`, or VKBACKEND_RUNTIME if it is None. Raises InvalidArgument for an unknown runtime."""
    wanted = env.runtime() if name is None else name
    if wanted not in RUNTIMES:
        raise InvalidArgument(f"runtime {wanted!r} is unknown; there are: {', '.join(RUNTIMES)}")
    return wanted


def require_kp() -> None:
    if importlib.util.find_spec("kp") is None:
        raise UnsupportedFeature(
            f"the kompute runtime needs the package kp, which {sys.prefix} does not have; run "
            "`bash tools/setup.sh --kompute` in a checkout and use .venv-kompute/bin/vkbackend, "
            "or take the native runtime"
        )


def open_device(info: DeviceInfo, label: str = "", runtime: str | None = None) -> Device:
    """Raises InvalidArgument, UnsupportedFeature."""
    if runtime_of(runtime) == "kompute":
        require_kp()
        from vkbackend.kompute.device import KomputeDevice

        return KomputeDevice(info, label)
    from vkbackend.vulkan.device import VulkanDevice

    return VulkanDevice(info, label)
