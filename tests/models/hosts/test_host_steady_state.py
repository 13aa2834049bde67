from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from device_sets import wide
from tiny_models import Tiny, write_tiny

import vkbackend.models.engine.runner.runner as runners
from vkbackend.meta.transport import TwinTransport, _TwinTransfers
from vkbackend.step import Run
from vkbackend.tools.measure.twin_nodes import twin_runner
from vkbackend.tools.studies.pipeline import Sleeping

pytestmark = pytest.mark.no_vulkan

N_ROWS, N_STEPS = 64, 30
# The largest number of bytes that a step may have allocated at any time. These bytes include the step's
# message, tokens, runs, and rows of cos and sin.
MOST_NBYTES = 32 << 10
TINY = Tiny("llama", n_embd=512, n_head=8, n_head_kv=4, n_vocab=3000, n_layer=2)


class Shared(_TwinTransfers):
    """Transfers whose receiver copies from the sender's memory, as a network does."""

    boxes: dict[Any, deque[Any]]

    def start(self) -> None:
        rank = self._transport.rank
        for host, part in self._sent:
            self.boxes.setdefault((rank, host, self._lane), deque()).append(part)
            self._transport._count(self._lane, part.nbytes)

    def finish(self) -> None:
        rank, wait = self._transport.rank, self._transport.wait
        for host, part in self._received:
            key = host, rank, self._lane
            wait(lambda key=key: bool(self.boxes.get(key)), self._purpose)  # type: ignore[misc]
            part[:] = self.boxes[key][0]
            self.boxes[key].popleft()
        for host, _ in self._sent:
            wait(lambda host=host: not self.boxes[rank, host, self._lane], self._purpose)  # type: ignore[misc]


@pytest.mark.own_process  # threads of earlier tests allocate memory, too
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([{"reduce_provider": "scatter"}, {"split_mode": "layer"}], id="scatter and layer"),
        wide(pytest.param([{}, {"reduce_provider": "host-sum"}], id="pages and host-sum")),
    ],
)
def test_a_step_over_hosts_allocates_nothing(
    tmp_path: Path, cases: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The devices compute nothing, so only code for nodes allocates memory."""
    zeros = lambda names, *_, **__: [Sleeping(word) for word in names]  # noqa: E731
    monkeypatch.setattr(runners, "open_devices", zeros)
    monkeypatch.setattr(Shared, "boxes", {}, raising=False)
    monkeypatch.setattr(TwinTransport, "transfers", lambda self, *a: Shared(self, *a))
    path = write_tiny(tmp_path / "model.gguf", TINY)
    for options in cases:
        check(path, **options)


def check(path: Path, **options: Any) -> None:
    sizes = {"n_ctx": 128, "n_ubatch": N_ROWS, "reduce_type": "f32"}
    with twin_runner(path, ["0/null", "1/null"], **sizes, **options) as runner:
        transports = runner.group.transports  # type: ignore[union-attr]
        peaks: list[int] = []

        def step() -> None:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            runner.step([5] * N_ROWS, [Run(0, 0, N_ROWS, 0)], range(N_ROWS))
            peaks.append(tracemalloc.get_traced_memory()[1] - before)

        tracemalloc.start()
        try:
            for _ in range(5):
                step()
            peaks.clear()
            moved = sum(t.n_bytes for t in transports)
            created = [device.created for device in runner.mesh.devices]
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(N_STEPS):
                step()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert [device.created for device in runner.mesh.devices] == created
        moved = (sum(t.n_bytes for t in transports) - moved) // N_STEPS
        assert max(peaks) < MOST_NBYTES and moved > 20 * MOST_NBYTES, (max(peaks), moved)
        assert grown < 200 * N_STEPS, grown  # the measurement allocates 40 bytes per step


ALONE = """
import tracemalloc
import numpy as np
from vkbackend.meta.mpi import MPITransport

transport, n = MPITransport(), 1 << 20
sent, received = np.arange(n, dtype=np.uint8), np.zeros(n, np.uint8)
transfers = transport.transfers([(0, sent)], [(0, received)], "itself")
transfers.run()
tracemalloc.start()
for i in range(200):
    sent += 1
    transfers.run()
    if i == 20:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
now, peak = tracemalloc.get_traced_memory()
assert (received == sent).all() and transport.n_messages == 201
print(now - before, peak - before)
transfers.close()
"""


def test_messages_of_mpi_are_prepared_once() -> None:
    """A child process sends 1 MiB to itself."""
    pytest.importorskip("mpi4py")
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, encoding="utf-8", timeout=100
    )
    assert done.returncode == 0, done.stderr
    grown, peak = map(int, done.stdout.split())
    assert grown < 1000 and peak < 10_000
