"""The runtimes behind the seam by name: the one place that chooses between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vkbackend import env
from vkbackend.errors import InvalidArgument
from vkbackend.runtime import Device

if TYPE_CHECKING:
    from vkbackend.capabilities import DeviceInfo

RUNTIMES = ("native", "kompute")


def runtime_of(name: str | None) -> str:
    """The runtime that a name means, None for VKBACKEND_RUNTIME or the default; raises InvalidArgument."""
    wanted = env.runtime() if name is None else name
    if wanted not in RUNTIMES:
        raise InvalidArgument(f"runtime {wanted!r} is unknown; there are: {', '.join(RUNTIMES)}")
    return wanted


def open_device(info: DeviceInfo, label: str = "", runtime: str | None = None) -> Device:
    """Open a physical device once more as a logical one. Raises InvalidArgument, UnsupportedFeature."""
    if runtime_of(runtime) == "kompute":  # imported on demand: neither runtime is needed for the other
        from vkbackend.kompute import KomputeDevice

        return KomputeDevice(info, label)
    from vkbackend.device import VulkanDevice

    return VulkanDevice(info, label)
