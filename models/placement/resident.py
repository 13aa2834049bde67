from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from vkbackend.buffer import Home
from vkbackend.models.placement.memory_report import Held
from vkbackend.runtime import Device

COUNTED = Home.WEIGHTS, Home.KV, Home.SCRATCH, Home.HOST, Home.STREAM, Home.STAGING, Home.VISIBLE, Home.SLOTS


@dataclass(frozen=True, slots=True)
class Resident:
    """A draft model or a projector, which is loaded before the model and may use the same physical devices.
    `held` lists the bytes on each of `devices`. If the resident is loaded, its bytes are no longer part of
    the free host memory."""

    name: str
    devices: tuple[Device, ...]
    held: tuple[Held, ...]
    is_loaded: bool = False

    @classmethod
    def opened(cls, name: str, devices: Sequence[Device]) -> Self:
        """Count the memory that `devices` have allocated."""
        counters = [{home.value: device.nbytes[home] for home in COUNTED} for device in devices]
        return cls(name, tuple(devices), tuple(Held(Counter(nbytes)) for nbytes in counters), is_loaded=True)

    def nbytes(self, like: Device, homes: Sequence[str]) -> int:
        """Return the number of bytes in `homes` on the physical device of `like`."""
        card = like.physical
        return sum(
            held.homes[home]
            for device, held in zip(self.devices, self.held, strict=True)
            if card and device.physical and device.physical.uuid == card.uuid
            for home in homes
        )

    def host_nbytes(self, node: str, homes: Sequence[str]) -> int:
        """Return the number of bytes in host memory of a node: in `homes`, and all bytes of software
        devices."""
        return sum(
            sum(held.homes.values()) if _is_software(device) else sum(held.homes[home] for home in homes)
            for device, held in zip(self.devices, self.held, strict=True)
            if device.node == node
        )


def _is_software(device: Device) -> bool:
    return device.physical is None or device.physical.is_cpu
