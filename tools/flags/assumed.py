"""Flags for speeds that `vkbackend plan` assumes instead of measuring the devices."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from vkbackend.checks import finite_number
from vkbackend.errors import InvalidArgument
from vkbackend.meta.rates import Rates
from vkbackend.tools.flags.experiments import TITLE

MOST = 1e6


@dataclass(frozen=True, slots=True)
class Assumed:
    """`rates` has one entry for each assumed exchange time."""

    rates: tuple[Rates, ...]
    acceptances: tuple[float, ...]


def add_assumed_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to the parser's group of experiments, which must exist."""
    [group] = (group for group in parser._action_groups if group.title == TITLE)
    add = group.add_argument
    add("--gb-per-s", type=float, metavar="N",
        help="assume that each device reads N GB of weights per second (default: measured)")  # fmt: skip
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
    weights, host = (_rate(args, name) for name in ("gb_per_s", "bus_gb_per_s"))
    times: list[float | None] = [None]
    if args.exchange_us is not None:
        times = [1e-6 * us for us in _numbers("--exchange-us", args.exchange_us, MOST)]
    shares = _numbers("--draft-accept", args.draft_accept, 1.0)
    return Assumed(tuple(Rates(weights, host, seconds) for seconds in times), tuple(shares))


def _rate(args: argparse.Namespace, name: str) -> float | None:
    given, flag = getattr(args, name), f"--{name.replace('_', '-')}"
    return None if given is None else 1e9 * finite_number(flag, given, 1e-3, MOST)


def _numbers(flag: str, text: str, high: float) -> list[float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        raise InvalidArgument(f"{flag} {text!r}: expected numbers with commas between them") from None
    return [finite_number(flag, value, 0, high) for value in values]
