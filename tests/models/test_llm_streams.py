from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runner import LOST, SLOW, continuation, row_of
from words import ENDS, Make, engine_of

from vkbackend import LLM
from vkbackend.errors import (
    DeviceLost,
    VkbackendError,
)

# ---- streams, slots and threads ----


def test_streams_read_in_turn_run_together(make: Make) -> None:
    llm = make(n_slots=2)
    streams = [llm.stream([1, i], 10, temperature=0, ignore_eos=True) for i in (8, 9)]
    pairs = list(zip(*streams, strict=True))
    for k, i in enumerate((8, 9)):
        assert [pair[k].token for pair in pairs] == continuation([1, i], 10, ENDS)
    assert any(len(runs) == 2 for runs in engine_of(llm).runner.steps)
    assert len(engine_of(llm).runner.steps) <= 12


def test_closing_a_stream_frees_its_slot(make: Make) -> None:
    llm = make(n_slots=1)
    for end in (lambda s: s.close(), lambda s: gc.collect()):
        stream = llm.stream([1, 8], temperature=0, ignore_eos=True)
        next(stream)
        end(stream)
        del stream
        assert llm.generate([1, 9], 4, temperature=0, ignore_eos=True).tokens == continuation([1, 9], 4, ENDS)
    assert not llm._mailbox.channel.readers and not engine_of(llm).busy  # type: ignore[union-attr]


def test_logits_wait_for_a_slot(make: Make) -> None:
    llm = make(n_slots=1)
    stream = llm.stream([1, 8], 20, temperature=0, ignore_eos=True)
    first = next(stream)
    assert np.array_equal(llm.logits([3, 4, 5]), [row_of([3]), row_of([3, 4]), row_of([3, 4, 5])])
    assert [first.token, *(c.token for c in stream)] == continuation([1, 8], 20, ENDS)


def test_many_threads(make: Make) -> None:
    llm = make(n_slots=3)
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        results[i] = [llm.generate([1, SLOW, i], 8, temperature=0, ignore_eos=True).tokens for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {i: [continuation([1, SLOW, i], 8, ENDS)] * 3 for i in range(8)}


def test_a_lost_device_reaches_every_stream(make: Make) -> None:
    llm = make(n_slots=2)
    stream = llm.stream([1, 8], 10, ignore_eos=True)
    next(stream)
    with pytest.raises(DeviceLost, match="Vulkan7"):
        llm.generate([1, LOST], 2)
    with pytest.raises(DeviceLost, match="Vulkan7"):
        list(stream)
    with pytest.raises(DeviceLost, match="Vulkan7"):
        llm.logits([1])


# ---- the end ----


def test_close(make: Make) -> None:
    llm = make()
    runner, stream = engine_of(llm).runner, llm.stream([1, 8], 10, ignore_eos=True)
    next(stream)
    llm.close()
    llm.close()
    assert runner.closed == 1
    for call in (lambda: next(stream), lambda: llm.generate([1], 1), lambda: llm.stream([1], 1), llm.memory,
                 lambda: llm.logits([1]), lambda: llm.tokenize("a"), lambda: llm.detokenize([1])):  # fmt:skip
        with pytest.raises(VkbackendError, match="closed"):
            call()


def test_close_waits_for_a_step_in_another_thread(make: Make) -> None:
    llm = make(n_ctx=1000)
    runner, started, ended = engine_of(llm).runner, threading.Event(), []

    def work() -> None:
        try:
            for _ in llm.stream([SLOW], ignore_eos=True):
                started.set()
        except VkbackendError as error:
            ended.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(10)
    llm.close()
    thread.join(10)
    assert runner.closed == 1 and len(ended) == 1 and "closed" in ended[0]


def test_a_dropped_llm_releases_everything(make: Make, model: Path) -> None:
    llm = LLM(model)
    runner = engine_of(llm).runner
    with llm as same:
        assert same is llm and llm.memory()[0]["weights"] == 1
    assert runner.closed == 1
    llm = LLM(model)
    runner = engine_of(llm).runner
    del llm
    gc.collect()
    assert runner.closed == 1


def test_progress_of_a_prompt(make: Make) -> None:
    """The prompt of 40 tokens is computed in three steps of at most 16 rows."""
    llm = make(n_slots=1, n_ubatch=16)
    prompt = [1, *(8 + i % 30 for i in range(39))]
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "prompt_progress": True}
    chunks = list(llm.stream(prompt, 3, **options))
    seen = [chunk.progress for chunk in chunks if chunk.progress]
    assert [(p.total, p.cached, p.processed) for p in seen] == [(40, 0, n) for n in (0, 16, 32, 40)]
    assert all(p.seconds >= 0 for p in seen) and [c.token is None for c in chunks] == [True] * 4 + [False] * 3
    again = [chunk.progress for chunk in llm.stream(prompt, 1, **options) if chunk.progress]
    assert again[0].cached == again[0].processed > 0 and again[-1].processed == 40


def test_a_prompt_without_the_cache(make: Make) -> None:
    llm = make(n_slots=2)
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    prompt = [1, *range(8, 38)]
    first = llm.generate(prompt, 2, **options)
    assert llm.generate(prompt, 2, **options).timings["prompt_n"] == 1
    fresh = llm.generate(prompt, 2, cache_prompt=False, **options)
    assert fresh.timings["prompt_n"] == len(prompt) and fresh.tokens == first.tokens


def test_timings_of_every_token(make: Make) -> None:
    chunks = list(make().stream([1, 8], 4, temperature=0, ignore_eos=True, timings_per_token=True))
    assert [int((chunk.timings or {})["decode_n"]) for chunk in chunks] == [0, 1, 2, 3]
