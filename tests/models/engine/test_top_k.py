"""Candidates that the devices choose: those of the logits, the same tokens as without, little read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS
from runners import load_runner

from vkbackend.models.llm import LLM
from vkbackend.models.placement import cost
from vkbackend.ops import MAX_TOP_K
from vkbackend.step import Run
from vkbackend.tools.measure import synthetic
from vkbackend.tools.measure.synthetic import Synthetic

LARGE = ("llama", 40_000, True, synthetic._dense(1, 64, 4, 2, 16, 96))  # several chunks on every device


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Synthetic:
    monkeypatch.setitem(synthetic.SHAPES, "large", LARGE)
    return Synthetic("large:f16")


@pytest.mark.parametrize("devices", [["numpy"], ["numpy"] * 3, *DEVICE_SETS], ids=str)
def test_candidates_are_those_of_the_logits(large: Synthetic, devices: list[str]) -> None:
    runner = load_runner(large, devices=devices, n_ctx=32, n_ubatch=4, n_slots=2)
    runs = [Run(0, 0, 2, 0), Run(1, 2, 2, 0)]
    logits = runner.step([5, 6, 7, 8], runs, [1, 3]).copy()
    want = np.argsort(-logits, axis=1, kind="stable")
    for k in (1, 40, MAX_TOP_K):
        ids, values = runner.step_top_k([5, 6, 7, 8], runs, [1, 3], k)
        assert ids.tolist() == want[:, :k].tolist()
        assert np.array_equal(values, np.take_along_axis(logits, ids, 1))
    runner.close()


@pytest.mark.parametrize("devices", [["numpy", "numpy"], *DEVICE_SETS[:2]], ids=str)
def test_the_same_tokens_as_from_whole_rows(
    models: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str]
) -> None:
    """Sampled and greedy requests side by side, and one that needs whole rows."""

    def run(**options: Any) -> list[list[int]]:
        with LLM(path, devices=devices, n_ctx=64, n_slots=3) as llm:
            assert bool(llm._mailbox.channel.engine._engine.runner.max_top_k) is on  # type: ignore[union-attr]
            return [
                llm.generate("Once upon", max_tokens=10, seed=1, ignore_eos=True, **kind).tokens
                for kind in ({}, {"temperature": 0}, {"temperature": 1.2, "repeat_penalty": 1.3})
            ]

    path, on = models / "stories-narrow-Q8_0.gguf", False
    whole = run()
    monkeypatch.setattr(cost, "TOP_K_VOCAB", 256)
    on = True
    assert run() == whole


def test_small_shares_give_whole_rows(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "TOP_K_VOCAB", 256)
    path = models / "stories-narrow-Q8_0.gguf"  # 512 tokens
    for n, top_k in ((4, MAX_TOP_K), (5, 0)):
        runner = load_runner(path, devices=["numpy"] * n, n_ctx=32)
        assert runner.max_top_k == top_k
        runner.close()
