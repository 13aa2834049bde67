from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS, wide
from runners import load_runner, step_top_k

from vkbackend.meta.candidates import TopK
from vkbackend.meta.recorded_steps import MAX_REPLACED
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.llm import LLM
from vkbackend.models.placement import traced_steps
from vkbackend.ops import MAX_TOP_K
from vkbackend.step import Run
from vkbackend.tools.measure import synthetic
from vkbackend.tools.measure.synthetic import Synthetic

# every device has several chunks of this vocabulary
LARGE = ("llama", 40_000, True, synthetic._dense(1, 64, 4, 2, 16, 96))


# test_candidates_equal_the_best_logits covers every set.
ON_TWO = [wide(pytest.param(["numpy", "numpy"])), wide(DEVICE_SETS[0]), DEVICE_SETS[1]]
SETS = [*map(wide, DEVICE_SETS)]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Synthetic:
    monkeypatch.setitem(synthetic.SHAPES, "large", LARGE)
    return Synthetic("large:f16")


@pytest.mark.parametrize("devices", [["numpy"] * 3, *SETS], ids=str)
def test_candidates_equal_the_best_logits(large: Synthetic, devices: list[str]) -> None:
    runner = load_runner(large, devices=devices, n_ctx=32, n_ubatch=4, n_slots=2)
    runs = [Run(0, 0, 2, 0), Run(1, 2, 2, 0)]
    logits = runner.step([5, 6, 7, 8], runs, [1, 3]).copy()
    want = np.argsort(-logits, axis=1, kind="stable")
    for k in (1, 40, MAX_TOP_K):
        best = step_top_k(runner, [5, 6, 7, 8], runs, [1, 3], k)
        assert best.ids.tolist() == want[:, :k].tolist() and best.log_sums is None
        assert np.array_equal(best.logits, np.take_along_axis(logits, best.ids, 1))
    runner.close()


@pytest.mark.parametrize("devices", [["numpy"] * 3, *SETS], ids=str)
def test_candidates_under_a_mask(large: Synthetic, devices: list[str]) -> None:
    runner = load_runner(large, devices=devices, n_ctx=32, n_ubatch=4, n_slots=2)
    runs = [Run(0, 0, 2, 0), Run(1, 2, 2, 0)]
    logits = runner.step([5, 6, 7, 8], runs, [1, 3]).copy()
    allowed = np.zeros((2, 40_000), bool)
    allowed[0, ::4001], allowed[0, 1::4001], allowed[1] = True, True, True
    masks = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)
    want = np.argsort(np.where(allowed, -logits, np.inf), axis=1, kind="stable")
    for k in (1, 40):
        best = step_top_k(runner, [5, 6, 7, 8], runs, [1, 3], k, masks)
        n = min(k, int(allowed[0].sum()))
        assert best.ids[0, :n].tolist() == want[0, :n].tolist()
        assert np.isneginf(best.logits[0, n:]).all() and np.isfinite(best.logits[0, :n]).all()
        assert best.ids[1].tolist() == want[1, :k].tolist()
    free = step_top_k(runner, [5, 6, 7, 8], runs, [1, 3], 1)
    assert free.ids[:, 0].tolist() == logits.argmax(axis=1).tolist()
    runner.close()


@pytest.mark.parametrize("devices", [["numpy"] * 3, *SETS], ids=str)
def test_sums_equal_sums_of_complete_rows(large: Synthetic, devices: list[str]) -> None:
    runner = load_runner(large, devices=devices, n_ctx=32, n_ubatch=4, n_slots=2)
    runs = [Run(0, 0, 2, 0), Run(1, 2, 2, 0)]
    logits = runner.step([5, 6, 7, 8], runs, [1, 3]).astype(np.float64)
    want = np.log(np.exp(logits - logits.max(axis=1)[:, None]).sum(axis=1)) + logits.max(axis=1)
    best = step_top_k(runner, [5, 6, 7, 8], runs, [1, 3], 40, summed=True)
    assert best.log_sums is not None and np.abs(best.log_sums - want).max() < 1e-5
    runner.close()


@pytest.mark.parametrize("devices", [["numpy"] * 3, *SETS], ids=str)
def test_a_larger_step_replaces_a_step_that_is_not_recorded(large: Synthetic, devices: list[str]) -> None:
    """A step with more rows and outputs than necessary returns the same candidates, with and without a mask,
    and the same sums."""
    padded, exact = (load_runner(large, devices=devices, n_ctx=32, n_ubatch=16, n_slots=4) for _ in range(2))
    padded.allow_padding()
    masks = np.full((4, -(-padded.n_vocab // 32)), 0x55555555, np.uint32)

    def step(runner: Runner, n_decode: int, n: int, masked: bool = False) -> TopK:
        """Compute decoding rows at position 0, and `n` rows of a prompt in the last slot."""
        runs = [*(Run(slot, slot, 1, 0) for slot in range(n_decode)), Run(3, n_decode, n, 0)]
        outputs = [*range(n_decode), n_decode + n - 1]
        mask = masks[: len(outputs)] if masked else None
        tokens = list(range(5, 5 + n_decode + n))
        return step_top_k(runner, tokens, runs, outputs, 4, mask, summed=not masked)

    for masked in (False, True):
        step(padded, 3, 13, masked)  # records 16 rows with 4 outputs
        for n_decode, n in ((1, 8), (1, 11), (2, 8)):
            got, want = step(padded, n_decode, n, masked), step(exact, n_decode, n, masked)
            assert got.ids.tolist() == want.ids.tolist()
            np.testing.assert_allclose(got.logits, want.logits, rtol=1e-4, atol=1e-5)
            if got.log_sums is not None and want.log_sums is not None:
                np.testing.assert_allclose(got.log_sums, want.log_sums, rtol=1e-5)
    assert padded.n_recorded == 2
    for _ in range(MAX_REPLACED):
        step(padded, 1, 9)
    assert padded.n_recorded == 3, "a kind that is needed often is recorded"
    step_top_k(padded, [5] * 9, [Run(0, 0, 9, 0)], [8], 4)
    assert padded.n_recorded == 4, "the rows of a sequence alone always have the same padding"
    for runner in (padded, exact):
        runner.close()


@pytest.mark.parametrize("devices", [["numpy"] * 3, *SETS], ids=str)
def test_three_rows_in_a_step_that_is_padded_to_four(large: Synthetic, devices: list[str]) -> None:
    runner = load_runner(large, devices=devices, n_ctx=32, n_ubatch=4, n_slots=3)
    runs = [Run(slot, slot, 1, 0) for slot in range(3)]
    logits = runner.step([5, 6, 7], runs, range(3)).copy()
    want = np.log(np.exp(logits - logits.max(axis=1)[:, None]).sum(axis=1)) + logits.max(axis=1)
    masks = np.full((3, -(-runner.n_vocab // 32)), 0xFFFFFFFE, np.uint32)
    for mask, summed in ((None, False), (None, True), (masks, False)):
        best = step_top_k(runner, [5, 6, 7], runs, range(3), 5, mask, summed)
        assert np.array_equal(best.logits, np.take_along_axis(logits, best.ids, 1))
        assert np.array_equal(best.ids[:, 0], logits.argmax(axis=1))
        assert not summed or (best.log_sums is not None and np.abs(best.log_sums - want).max() < 1e-4)
    runner.close()


@pytest.mark.parametrize("devices", ON_TWO, ids=str)
def test_tokens_equal_tokens_from_complete_rows(
    models: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str]
) -> None:

    def run(**options: Any) -> list[list[int]]:
        with LLM(path, devices=devices, n_ctx=64, n_slots=3) as llm:
            assert bool(llm._mailbox.channel.engine._engine.runner.max_top_k) is on  # type: ignore[union-attr]
            return [
                llm.generate("Once upon", max_tokens=6, seed=1, ignore_eos=True, **kind).tokens
                for kind in ({}, {"temperature": 0}, {"temperature": 1.2, "repeat_penalty": 1.3})
            ]

    path, on = models / "stories-narrow-Q8_0.gguf", False
    whole = run()
    monkeypatch.setattr(traced_steps, "TOP_K_VOCAB", 256)
    on = True
    assert run() == whole


@pytest.mark.parametrize("devices", ON_TWO, ids=str)
def test_logprobs_equal_logprobs_from_complete_rows(
    models: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str]
) -> None:
    def run() -> list[Any]:
        with LLM(models / "stories-narrow-Q8_0.gguf", devices=devices, n_ctx=64) as llm:
            kinds: list[dict[str, Any]] = [{"logprobs": 3}, {"logprobs": 0, "temperature": 0}]
            return [llm.generate("Once upon", 8, seed=1, ignore_eos=True, **kind).logprobs for kind in kinds]

    whole = run()
    monkeypatch.setattr(traced_steps, "TOP_K_VOCAB", 256)
    for want, got in zip(whole, run(), strict=True):
        assert len(want) == len(got) == 8
        for a, b in zip(want, got, strict=True):
            assert [token for token, _ in a.top] == [token for token, _ in b.top]
            values = zip(
                [a.logprob, *(x for _, x in a.top)], [b.logprob, *(x for _, x in b.top)], strict=True
            )
            assert all(abs(x - y) < 1e-5 for x, y in values)


def test_small_shares_return_complete_rows(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced_steps, "TOP_K_VOCAB", 256)
    path = models / "stories-narrow-Q8_0.gguf"  # 512 tokens
    for n, top_k in ((2, MAX_TOP_K), (3, 0)):
        runner = load_runner(path, devices=["numpy"] * n, n_ctx=32)
        assert runner.max_top_k == top_k
        runner.close()
