"""What a model gains from a second host, by arithmetic on what was measured (docs/hosts.md has the model)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOCAL_REDUCE_S = 34e-6  # an all-reduce of GPUs in one machine; an exchange between hosts comes on top


@dataclass(frozen=True, slots=True)
class HostRates:
    """A host: the bytes per second that its devices read together, and the bytes they can still hold (None:
    unknown)."""

    rate: float
    free: int | None


@dataclass(frozen=True, slots=True)
class Placement:
    """A way to place the model, and the seconds of a token for a request that is alone."""

    name: str
    seconds: float
    n_exchanges: int


def placements(
    nbytes: int, n_layers: int, hosts: Sequence[HostRates], exchange_s: float, handover_s: float
) -> list[Placement]:
    """The placements that are possible, with their times. A token reads `nbytes` of weights. An exchange
    moves a layer's sum between all hosts, a handover the residual from one to the next."""
    every = sum(host.rate for host in hosts)
    found = [
        Placement("tensor", nbytes / every + 2 * n_layers * (LOCAL_REDUCE_S + exchange_s), 2 * n_layers),
        # Layers in proportion to speed; each host reads its part while the others wait.
        Placement("hosts", len(hosts) * nbytes / every + (len(hosts) - 1) * handover_s, len(hosts) - 1),
    ]
    if all(host.free is None or host.free >= nbytes for host in hosts):
        slowest = min(host.rate for host in hosts)
        found.insert(0, Placement("replicas", nbytes / slowest, 0))
    return found


def break_even_s(nbytes: int, n_layers: int, hosts: Sequence[HostRates]) -> float:
    """With exchanges shorter than this, tensor parallelism over hosts is faster than hosts in turn. Negative:
    it never is."""
    every = sum(host.rate for host in hosts)
    alone = len(hosts) * nbytes / every
    return (alone - nbytes / every) / (2 * n_layers) - LOCAL_REDUCE_S


def advice(nbytes: int, n_layers: int, hosts: Sequence[HostRates], exchange_s: float) -> str:
    """One sentence."""
    limit = break_even_s(nbytes, n_layers, hosts)
    pays = exchange_s < limit
    times = (
        f"an exchange takes {1e6 * exchange_s:.0f} us, and {1e6 * max(0.0, limit):.0f} us are the break-even"
    )
    if all(host.free is None or host.free >= nbytes for host in hosts):
        text = "each host holds the model: run one server on each behind a balancer (docs/deploy)"
        return (
            f"{text}; for one sooner answer -sm tensor over hosts pays: {times}"
            if pays
            else f"{text}; {times}"
        )
    if pays:
        return f"tensor parallel over all hosts (-sm tensor): {times}"
    return f"whole layers on each host (-sm hosts): {times}"
