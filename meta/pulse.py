"""Send heartbeats between node 0 and every other node in a thread, even while a node compiles or loads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from vkbackend import env
from vkbackend.errors import VkbackendError
from vkbackend.meta.transport import Lane, Transport

BEAT_S = 0.5
MAX_FAILURE_NBYTES = 4096


class Pulse:
    """If a node is silent for `silence_s` or fails, set `transport.lost` and call `on_lost` once."""

    def __init__(self, transport: Transport, silence_s: float | None = None) -> None:
        self._transport = transport
        self._silence_s = env.silence_s() if silence_s is None else silence_s
        self.on_lost: Callable[[], None] = lambda: None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="vkbackend-pulse", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        transport = self._transport
        peers = [0] if transport.rank else transport.others
        heard = dict.fromkeys(peers, time.monotonic())
        while not transport.lost:
            try:
                for node in peers:
                    transport.beat(node)
                    while transport.poll(node, Lane.BEAT, 0) is not None:
                        heard[node] = time.monotonic()
                    if (words := transport.poll(node, Lane.FAILURE, MAX_FAILURE_NBYTES)) is not None:
                        transport.lost = f"{transport.names[node]} failed: {words.decode(errors='replace')}"
                    elif (silent := time.monotonic() - heard[node]) > self._silence_s:
                        transport.lost = f"{transport.names[node]} has sent no heartbeat for {silent:.0f} s"
            except VkbackendError as error:
                transport.lost = str(error)
            if self._ended.wait(BEAT_S):
                return
        self.on_lost()

    def close(self) -> None:
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * BEAT_S)
