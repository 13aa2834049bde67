"""Predicts the gain of a second host from measured rates. docs/hosts.md describes the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOCAL_REDUCE_S = 34e-6  # an all-reduce within a machine, without the exchange between hosts


@dataclass(frozen=True, slots=True)
class HostRates:
    """The bytes per second that a host's devices read, and its free bytes. None means unknown."""

    rate: float
    free: int | None


@dataclass(frozen=True, slots=True)
class Placement:
    name: str
    seconds: float
    n_exchanges: int


def placements(
    nbytes: int, n_layers: int, hosts: Sequence[HostRates], exchange_s: float, handover_s: float
) -> list[Placement]:
    """Return possible placements with their times. Each token reads `nbytes` of weights. An exchange sends a
    layer's sum to all hosts, and a handover sends the residual to the next host."""
    every = sum(host.rate for host in hosts)
    choices = [
        Placement("tensor", nbytes / every + 2 * n_layers * (LOCAL_REDUCE_S + exchange_s), 2 * n_layers),
        # Each host has layers in proportion to its speed, and only one host computes at a time.
        Placement("hosts", len(hosts) * nbytes / every + (len(hosts) - 1) * handover_s, len(hosts) - 1),
    ]
    if all(host.free is None or host.free >= nbytes for host in hosts):
        slowest = min(host.rate for host in hosts)
        choices.insert(0, Placement("replicas", nbytes / slowest, 0))
    return choices


def break_even_s(nbytes: int, n_layers: int, hosts: Sequence[HostRates]) -> float:
    """Return the exchange time at which tensor parallelism over hosts is as fast as hosts in sequence. A
    negative time means that tensor parallelism is always slower."""
    every = sum(host.rate for host in hosts)
    alone = len(hosts) * nbytes / every
    return (alone - nbytes / every) / (2 * n_layers) - LOCAL_REDUCE_S


def advice(nbytes: int, n_layers: int, hosts: Sequence[HostRates], exchange_s: float) -> str:
    limit = break_even_s(nbytes, n_layers, hosts)
    pays = exchange_s < limit
    times = (
        f"an exchange takes {1e6 * exchange_s:.0f} us, and {1e6 * max(0.0, limit):.0f} us are the break-even"
    )
    if all(host.free is None or host.free >= nbytes for host in hosts):
        text = "each host holds the model: run one server per host with a load balancer (docs/deploy)"
        return (
            f"{text}; for one sooner answer -sm tensor over hosts pays: {times}"
            if pays
            else f"{text}; {times}"
        )
    if pays:
        return f"tensor parallel over all hosts (-sm tensor): {times}"
    return f"whole layers on each host (-sm hosts): {times}"
