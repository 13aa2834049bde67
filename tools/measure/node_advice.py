"""Predicts the gain of a second node from measured rates. docs/hosts.md describes the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOCAL_REDUCE_S = 34e-6  # time of an all-reduce within one machine


@dataclass(frozen=True, slots=True)
class NodeRates:
    """The bytes per second that a node's devices read, and its free bytes. None means unknown."""

    rate: float
    free: int | None


@dataclass(frozen=True, slots=True)
class Placement:
    name: str
    seconds: float
    n_exchanges: int


def placements(
    nbytes: int, n_layers: int, nodes: Sequence[NodeRates], exchange_s: float, handover_s: float
) -> list[Placement]:
    """Return possible placements with their times. Each token reads `nbytes` of weights. An exchange sends a
    layer's sum to all nodes, and a handover sends the residual to the next node."""
    every = sum(node.rate for node in nodes)
    choices = [
        Placement("tensor", nbytes / every + 2 * n_layers * (LOCAL_REDUCE_S + exchange_s), 2 * n_layers),
        # Each node has layers in proportion to its speed, and only one node computes at a time.
        Placement("hosts", len(nodes) * nbytes / every + (len(nodes) - 1) * handover_s, len(nodes) - 1),
    ]
    if all(node.free is None or node.free >= nbytes for node in nodes):
        slowest = min(node.rate for node in nodes)
        choices.insert(0, Placement("replicas", nbytes / slowest, 0))
    return choices


def break_even_s(nbytes: int, n_layers: int, nodes: Sequence[NodeRates]) -> float:
    """Return the exchange time in seconds at which tensor parallelism over nodes is as fast as nodes in
    sequence. If the time is negative, tensor parallelism is always slower."""
    every = sum(node.rate for node in nodes)
    alone = len(nodes) * nbytes / every
    return (alone - nbytes / every) / (2 * n_layers) - LOCAL_REDUCE_S


def advice(nbytes: int, n_layers: int, nodes: Sequence[NodeRates], exchange_s: float) -> str:
    limit = break_even_s(nbytes, n_layers, nodes)
    pays = exchange_s < limit
    times = (
        f"an exchange takes {1e6 * exchange_s:.0f} us, and {1e6 * max(0.0, limit):.0f} us are the break-even"
    )
    if all(node.free is None or node.free >= nbytes for node in nodes):
        text = "each host holds the model: run one server per host with a load balancer (docs/deploy)"
        return (
            f"{text}; for one sooner answer -sm tensor over hosts pays: {times}"
            if pays
            else f"{text}; {times}"
        )
    if pays:
        return f"tensor parallel over all hosts (-sm tensor): {times}"
    return f"whole layers on each host (-sm hosts): {times}"
