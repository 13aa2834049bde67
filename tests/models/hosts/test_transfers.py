"""Nodes send only the messages and bytes that a step needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import Tiny, write_tiny

from vkbackend.meta import ways
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.step import Run
from vkbackend.tools.measure.twin_nodes import twin_runner

pytestmark = pytest.mark.no_vulkan

TOKENS = np.random.default_rng(3).integers(3, 120, 300).tolist()
OPTIONS: dict[str, Any] = {"n_ctx": 192, "n_slots": 2, "n_ubatch": 128, "reduce_type": "f32"}
TWO, THREE = ["0/numpy", "1/numpy"], ["0/numpy", "1/numpy", "1/numpy"]
FOUR, HOSTS = ["0/numpy", "0/numpy", "1/numpy", "1/numpy"], ["0/numpy", "1/numpy", "2/numpy"]


def sent_in_a_step(runner: Runner, n_rows: int = 1) -> list[tuple[int, int]]:
    """Return how many messages and bytes each of two nodes sent in a step. The step was recorded before, so
    recording sends nothing here."""

    def step(at: int) -> None:
        runner.step(TOKENS[:n_rows], [Run(0, 0, n_rows, at)], [n_rows - 1])

    step(0)
    transports = runner.group.transports  # type: ignore[union-attr]
    before = [(t.n_messages, t.n_bytes) for t in transports]
    step(n_rows)
    step(2 * n_rows)
    return [
        ((t.n_messages - m) // 2, (t.n_bytes - n) // 2) for t, (m, n) in zip(transports, before, strict=True)
    ]


@pytest.mark.parametrize("places", [TWO, THREE])
def test_transfers_in_tensor_mode(tmp_path: Path, places: list[str]) -> None:
    """In a step, nodes send only two sums per layer, node 0's call, and the logits. They send nothing
    else."""
    tiny = Tiny("llama", n_head=6, n_head_kv=3, n_vocab=192, n_layer=2)
    path = write_tiny(tmp_path / "model.gguf", tiny)
    with twin_runner(path, places, 2, **OPTIONS) as runner:
        (led, led_nbytes), (followed, followed_nbytes) = sent_in_a_step(runner)
    n_there, slot = len(places) - 1, 4 * tiny.n_embd
    assert led == 2 * tiny.n_layer + 1 and led_nbytes - 2 * tiny.n_layer * slot < 128  # the call
    logits_nbytes = 4 * tiny.n_vocab * n_there // len(places)
    assert followed == n_there * (2 * tiny.n_layer + 1)
    assert abs(followed_nbytes - n_there * 2 * tiny.n_layer * slot - logits_nbytes) <= 4 * 32


@pytest.mark.parametrize(
    ("places", "provider", "slots"),
    [
        # two nodes send complete slots, because parts would have as many bytes and need a second exchange
        (TWO, "host-sum", [1, 1]),
        # complete slots would need 2 slots per node
        pytest.param(HOSTS, "host-sum", [4 / 3] * 3, marks=pytest.mark.wide),
        (HOSTS, "auto", [4 / 3] * 3),
        # Node 0 sends three half slots: the partial sum of each of its devices, and the sum.
        (["0/numpy", "0/numpy", "1/numpy"], "host-sum", [3 / 2, 1]),
    ],
    ids=str,
)
def test_transfers_of_large_sums(
    tmp_path: Path, places: list[str], provider: str, slots: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes send parts of a sum if parts have fewer bytes than complete slots for all other nodes. `slots`
    lists the number of slots that each node sends."""
    monkeypatch.setattr(ways, "SCATTER_NBYTES", 1 << 12)
    tiny, n_rows = Tiny("llama", n_embd=96, n_head=6, n_head_kv=3, n_layer=1), 64
    path = write_tiny(tmp_path / "model.gguf", tiny)
    with twin_runner(path, places, len(slots), reduce_provider=provider, **OPTIONS) as runner:
        sent = [nbytes for _, nbytes in sent_in_a_step(runner, n_rows)]
    slot, n_sums = 4 * n_rows * tiny.n_embd, 2 * tiny.n_layer
    for nbytes, n_slots in zip(sent, slots, strict=True):
        # a node sends slots, and in addition only a call or a row of logits
        assert 0 <= nbytes - n_sums * n_slots * slot < 1000, (sent, slot)


@pytest.mark.parametrize("places", [TWO, HOSTS], ids=str)
def test_transfers_in_a_pipeline(tmp_path: Path, places: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipeline, each node sends the residual only once, to the next node. The last node sends the
    logits."""
    monkeypatch.setattr(ways, "SCATTER_NBYTES", 1 << 8)
    tiny = Tiny("llama", n_layer=3)
    path, n = write_tiny(tmp_path / "model.gguf", tiny), len(places)
    with twin_runner(path, places, n, split_mode="layer", **OPTIONS) as runner:
        led, *between, (followed, followed_nbytes) = sent_in_a_step(runner)
    assert led[0] == n and 4 * tiny.n_embd < led[1] < 4 * tiny.n_embd + 128 * (n - 1)
    assert between == [(1, 4 * tiny.n_embd)] * (n - 2)
    assert (followed, followed_nbytes) == (1, 4 * tiny.n_vocab)


def test_transfers_with_slices_within_hosts(tmp_path: Path) -> None:
    """Devices exchange sums within a node. At the end of a node's layers, each device sends one slot to the
    next node."""
    tiny = Tiny("llama", n_head=6, n_head_kv=3, n_vocab=192, n_layer=3)
    path = write_tiny(tmp_path / "model.gguf", tiny)
    with twin_runner(path, FOUR, 2, split_mode="hosts", **OPTIONS) as runner:
        (led, led_nbytes), followed = sent_in_a_step(runner)
    assert led == 3 and 0 < led_nbytes - 2 * 4 * tiny.n_embd < 128
    assert followed == (2, 4 * tiny.n_vocab)
