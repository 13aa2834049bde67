"""Measure exchanges in which two nodes send to each other simultaneously."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from vkbackend.meta.transport import Transport

SMALL_NBYTES, LARGE_NBYTES = 8 << 10, 1 << 20
N_SMALL, N_LARGE = 100, 8


@dataclass(frozen=True, slots=True)
class ExchangeTime:
    """The seconds of a small exchange, and the bytes per second per direction of a large one."""

    small_s: float
    rate: float

    def seconds(self, nbytes: int) -> float:
        return self.small_s + max(0, nbytes - SMALL_NBYTES) / self.rate


def times_of(transport: Transport, node: int, nbytes: int, n: int) -> list[float]:
    """Time `n` exchanges one by one, after a warm-up, and return their seconds. The other node must call this
    too."""
    sent, received = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    transfers = transport.transfers([(node, sent)], [(node, received)], "a measured exchange")
    seconds = []
    for _ in range(n + 1):
        began = time.perf_counter()
        transfers.run()
        seconds.append(time.perf_counter() - began)
    transfers.close()
    return seconds[1:]


def measure_exchanges(transport: Transport) -> dict[int, ExchangeTime]:
    """Measure exchanges between node 0 and each other node. All nodes must call this."""
    times = {}
    for node in [0] if transport.rank else transport.others:
        small = float(np.median(times_of(transport, node, SMALL_NBYTES, N_SMALL)))
        large = float(np.median(times_of(transport, node, LARGE_NBYTES, N_LARGE)))
        times[node] = ExchangeTime(small, (LARGE_NBYTES - SMALL_NBYTES) / max(large - small, 1e-6))
    return times
