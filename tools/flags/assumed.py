"""Flags for speeds that `vkbackend plan` assumes instead of measuring the devices."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vkbackend.checks import finite_number
from vkbackend.errors import InvalidArgument
from vkbackend.meta.rates import Rates
from vkbackend.runtime import Device
from vkbackend.tools.flags.experiments import TITLE

MOST = 1e6


@dataclass(frozen=True, slots=True)
class Assumed:
    """`rates` has one entry for each assumed exchange time. `weights` lists the assumed bytes per second of
    each device, if there are several."""

    rates: tuple[Rates, ...]
    acceptances: tuple[float, ...]
    weights: tuple[float, ...] = ()

    def on(self, devices: Sequence[Device]) -> Assumed:
        """Give each device its speed. Raises InvalidArgument."""
        if not self.weights:
            return self
        if len(self.weights) != len(devices):
            raise InvalidArgument(
                f"--gb-per-s gives {len(self.weights)} speeds for {len(devices)} devices; give one for all "
                "or one for each"
            )
        each = tuple((device.name, w) for device, w in zip(devices, self.weights, strict=True))
        return replace(self, rates=tuple(replace(rates, of_each=each) for rates in self.rates))


def add_assumed_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to the parser's group of experiments, which must exist."""
    [group] = (group for group in parser._action_groups if group.title == TITLE)
    add = group.add_argument
    add("--gb-per-s", metavar="LIST",
        help="assume that a device reads so many GB of weights per second: one number for all devices, or "
        "one for each (default: measured)")  # fmt: skip
    add("--bus-gb-per-s", type=float, metavar="N",
        help="assume that each device reads N GB of host memory per second (default: measured)")  # fmt: skip
    add("--exchange-us", metavar="LIST",
        help="assume that an exchange takes so many microseconds, and the time of its bytes over the bus; "
        "several: the gain of drafts for each (default: measured)")  # fmt: skip
    add("--draft-accept", default="0.5,0.7,0.85", metavar="LIST",
        help="predict the gain of drafts for these shares of accepted tokens (default: "
        "%(default)s)")  # fmt: skip


def assumed_of(args: argparse.Namespace) -> Assumed:
    """Raises InvalidArgument."""
    host, weights = _rate(args, "bus_gb_per_s"), tuple[float, ...]()
    if args.gb_per_s is not None:
        weights = tuple(1e9 * n for n in _numbers("--gb-per-s", args.gb_per_s, MOST, 1e-3))
    alike = weights[0] if len(weights) == 1 else None
    times: list[float | None] = [None]
    if args.exchange_us is not None:
        times = [1e-6 * us for us in _numbers("--exchange-us", args.exchange_us, MOST)]
    shares = _numbers("--draft-accept", args.draft_accept, 1.0)
    rates = tuple(Rates(alike, host, seconds) for seconds in times)
    return Assumed(rates, tuple(shares), weights if len(weights) > 1 else ())


def _rate(args: argparse.Namespace, name: str) -> float | None:
    given, flag = getattr(args, name), f"--{name.replace('_', '-')}"
    return None if given is None else 1e9 * finite_number(flag, given, 1e-3, MOST)


def _numbers(flag: str, text: str, high: float, low: float = 0) -> list[float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        raise InvalidArgument(f"{flag} {text!r}: expected numbers with commas between them") from None
    return [finite_number(flag, value, low, high) for value in values]
