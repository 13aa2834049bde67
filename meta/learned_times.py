"""Learns times from measured tokens, for later predictions.

A token takes longer than reading the weights, because a device waits between short commands. From a token of
one device, this additional time is learned per layer. A group of devices takes even longer than reading,
layers and exchanges, because a device idles before and after each exchange. This time is learned per
exchange. Both are medians of stored measurements.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from vkbackend.meta.known_speed import key_of, remember, stored
from vkbackend.runtime import Device

MOST = 16  # measurements are kept for each group of devices
WRONG = 0.2  # a prediction is wrong if it differs by more than this share of the measured time


@dataclass(frozen=True, slots=True)
class Token:
    """A measured token, and the predicted seconds of reading weights and of exchanges, without the time that
    devices idle."""

    n_layers: float
    read_s: float
    n_exchanges: float
    exchange_s: float
    predicted_s: float
    measured_s: float


def remember_token(devices: Sequence[Device], token: Token) -> None:
    rows = [list(map(float, astuple(of))) for of in (*known_tokens(devices), token)]
    remember(_key(devices), rows[-MOST:])


def known_tokens(devices: Sequence[Device]) -> list[Token]:
    """Return the stored measurements, except damaged ones."""
    value = stored(_key(devices))
    tokens = []
    for row in value if isinstance(value, list) else []:
        if (
            isinstance(row, list)
            and len(row) == 6
            and all(type(x) is float and 0 <= x < math.inf for x in row)
        ):
            tokens.append(Token(*row))
    return [token for token in tokens if token.n_layers >= 1 and token.measured_s > 0]


def layer_seconds(devices: Sequence[Device]) -> float:
    """Return the time per layer of the slowest device, or 0 if no token of one device was measured. Tokens of
    the group limit this time, because a device with a small share of each layer takes less time."""
    alone = max((_layer_seconds(device) for device in devices), default=0.0)
    beyond = [(of.measured_s - of.read_s - of.exchange_s) / of.n_layers for of in known_tokens(devices)]
    return max(0.0, min(alone, statistics.median(beyond))) if beyond else alone


def _layer_seconds(device: Device) -> float:
    beyond = [(of.measured_s - of.read_s) / of.n_layers for of in known_tokens([device])]
    return max(0.0, statistics.median(beyond)) if beyond else 0.0


def cut_seconds(devices: Sequence[Device]) -> float:
    """Return the time that the devices idle around an exchange, or 0 if it was not measured."""
    each = layer_seconds(devices)
    beyond = [
        (of.measured_s - of.read_s - of.exchange_s - each * of.n_layers) / of.n_exchanges
        for of in known_tokens(devices)
        if of.n_exchanges
    ]
    return max(0.0, statistics.median(beyond)) if beyond else 0.0


def is_wrong(predicted: float, measured: float) -> bool:
    return abs(predicted - measured) > WRONG * measured


def _key(devices: Sequence[Device]) -> str:
    return f"tokens {', '.join(map(key_of, devices))}"
