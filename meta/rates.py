"""The speeds that predict the time of a step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from vkbackend.meta.host_memory import shared_bus
from vkbackend.meta.known_speed import Speed
from vkbackend.meta.learned_times import cut_seconds, layer_seconds
from vkbackend.meta.speed import class_of, measure_reduce, measure_speed, resource_of
from vkbackend.runtime import Device


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds given by the user, which replace measured speeds. `weights` and `host` are the bytes per second
    of Speed; `of_each` lists (device's name, weights) if they differ. An exchange takes `exchange_s` seconds,
    plus the time to transfer its bytes at the rate `host`. A layer takes `layer_s` seconds in addition to
    reading its weights. Around an exchange, devices idle for `cut_s` seconds (learned_times.py)."""

    weights: float | None = None
    host: float | None = None
    exchange_s: float | None = None
    layer_s: float | None = None
    cut_s: float | None = None
    of_each: tuple[tuple[str, float], ...] = ()

    def speed(self, device: Device) -> Speed:
        weights = dict(self.of_each).get(device.name, self.weights)
        if weights and self.host:
            return Speed(weights, self.host)
        measured = measure_speed(device)
        return Speed(weights or measured.weights, self.host or measured.host)

    def kind(self, device: Device) -> Hashable:
        """Return a key. Devices with equal keys are equally fast."""
        return class_of(device), dict(self.of_each).get(device.name)

    def speeds(self, devices: Sequence[Device], host: Sequence[int]) -> tuple[Speed, ...]:
        """Return the speeds of devices that work at the same time. `host` holds the bytes that each device
        reads over its bus. Devices on one bus read more slowly than one alone."""
        speeds = [self.speed(device) for device in devices]
        return tuple(speeds if self.host else shared_bus(devices, speeds, [n > 0 for n in host]))

    def resources(self, devices: Sequence[Device]) -> list[Hashable]:
        """Return a label for each device. Devices with equal labels are on one resource and share its
        measured speed. A speed given by the user is the speed of each single device."""
        given = self.weights or self.of_each
        return list(range(len(devices))) if given else [resource_of(device) for device in devices]

    def layer(self, devices: Sequence[Device]) -> float:
        """Return the seconds that a layer takes in addition to reading its weights. If the user gave speeds,
        return 0, because these speeds were not measured."""
        if self.layer_s is not None or self.weights or self.of_each:
            return self.layer_s or 0.0
        return layer_seconds([device for device in devices if not device.node])

    def cut(self, devices: Sequence[Device]) -> float:
        if self.cut_s is not None or self.weights or self.of_each or self.exchange_s is not None:
            return self.cut_s or 0.0
        return cut_seconds(devices) if not any(device.node for device in devices) else 0.0

    def reduce(self, devices: Sequence[Device], nbytes: int) -> float:
        """Return the seconds of an all-reduce of `nbytes`, or 0 for one device."""
        if self.exchange_s is None or len(devices) < 2:
            return measure_reduce(devices, nbytes)
        return self.exchange_s + nbytes / min(self.speed(device).host for device in devices)


MEASURED = Rates()
