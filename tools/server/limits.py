from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from vkbackend.tools.server.failures import Refusal

MAX_RETRY_S = 60


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the server. uvicorn also buffers 64 KiB per client, then waits `drain_s` seconds."""

    body_nbytes: int = 8 << 20
    json_depth: int = 64
    header_nbytes: int = 32 << 10  # Includes the request line.
    connections: int = 512  # The default limit of open files is 1,024.
    streams: int = 128
    queue: int = 256  # At most this many sequences wait for a slot.
    prompts: int = 128
    images: int = 16
    stops: int = 32  # Also the limit of DRY's sequence breakers.
    stop_length: int = 1024
    biases: int = 1024
    header_s: float = 10.0
    body_s: float = 10.0
    drain_s: float = 10.0  # A client has this time to read its buffered data.
    idle_s: float = 65.0  # Proxies wait 60 s.
    ping_s: float = 15.0  # Idle streams get a comment this often, so that proxies keep them open.
    shutdown_s: float = 30.0  # Running requests may continue this long after SIGTERM.


@dataclass(slots=True)
class Admission:
    limits: Limits
    n_slots: int
    n_sequences: int = 0
    n_streams: int = 0
    n_refused: int = 0
    _took_s: float = field(default=1.0)  # a moving average

    @property
    def n_waiting(self) -> int:
        return max(0, self.n_sequences - self.n_slots)

    @contextmanager
    def enter(self, n: int, *, streams: bool) -> Iterator[None]:
        """Admit `n` sequences for the duration of the `with` block. Raises Refusal (429)."""
        most = self.n_slots + self.limits.queue
        if self.n_sequences + n > most:
            reason = (
                f"{self.n_sequences} sequences run or wait, at most {most} are allowed (--parallel, --queue)"
            )
            raise self._refusal(reason)
        if streams and self.n_streams >= self.limits.streams:
            raise self._refusal(f"{self.n_streams} streams are open, which is the limit (--max-streams)")
        self.n_sequences += n
        self.n_streams += streams
        try:
            yield
        finally:
            self.n_sequences -= n
            self.n_streams -= streams

    def took(self, seconds: float) -> None:
        self._took_s += 0.1 * (seconds - self._took_s)

    def _refusal(self, reason: str) -> Refusal:
        self.n_refused += 1
        rounds = 1 + self.n_waiting / self.n_slots
        wait_s = min(MAX_RETRY_S, max(1, round(rounds * self._took_s)))
        return Refusal(429, f"{reason}; retry in {wait_s} s", retry_s=wait_s)
