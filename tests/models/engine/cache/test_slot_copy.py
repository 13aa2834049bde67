from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS, only, wide
from oracles.fixture import N_VOCAB, write
from oracles.fixtures import build

from vkbackend import LLM
from vkbackend.errors import InvalidArgument
from vkbackend.models.engine.cache import slot_copy

PROMPT = np.random.default_rng(5).integers(0, N_VOCAB, 45).tolist()
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def check(path: Path, devices: list[str], **options: Any) -> None:
    with LLM(path, devices=devices, n_ctx=96, n_slots=3, n_ubatch=32, **options) as llm:
        want = llm.generate(PROMPT, max_tokens=12, slot=0, **GREEDY).tokens
        llm.generate(PROMPT[::-1], max_tokens=3, slot=2, **GREEDY)  # the copy replaces this
        held = llm.generate(PROMPT, max_tokens=4, slot=0, **GREEDY).tokens
        copied = llm.copy_slot(0, 2)
        assert copied == PROMPT + held and held == want[:4]
        for slot in (2, 0):
            more = llm.generate(copied, max_tokens=8, slot=slot, **GREEDY)
            assert more.tokens == want[4:] and more.timings["prompt_n"] == 1


@pytest.mark.parametrize(
    "name",
    ["gpt-oss", *(wide(pytest.param(name, id=name)) for name in ("llama", "qwen35", "gemma3"))],
)
def test_both_slots_continue_after_a_copy(tmp_path: Path, name: str) -> None:
    check(write(build(name), tmp_path / "model.gguf"), ["numpy"] * 2)


@pytest.mark.parametrize("devices", only(DEVICE_SETS[1:4:2], "0,0"))
def test_on_devices(tmp_path: Path, devices: list[str]) -> None:
    check(write(build("qwen35"), tmp_path / "model.gguf"), devices)


def test_quantized_caches(models: Path) -> None:
    with LLM(models / "stories-wide-F16.gguf", devices=["numpy"], n_ctx=64, n_slots=2,
             type_k="q8_0", type_v="q4_0") as llm:  # fmt: skip
        first = llm.generate("Once upon a time", max_tokens=20, slot=0, **GREEDY)
        tokens = llm.copy_slot(0, 1)
        more = [llm.generate(tokens, max_tokens=8, slot=slot, **GREEDY).tokens for slot in (0, 1)]
        assert more[0] == more[1] and len(tokens) == len(first.prompt_tokens) + 20


def test_consecutive_blocks_are_one_copy() -> None:
    assert slot_copy._runs(np.array([[0, 1, 2, 3], [8, 9, 10, 11]])) == [(0, 8, 4)]
    assert slot_copy._runs(np.array([[0, 1, 3, 4], [8, 9, 10, 7]])) == [(0, 8, 2), (3, 10, 1), (4, 7, 1)]


def test_refusals(tmp_path: Path) -> None:
    path = write(build("llama"), tmp_path / "model.gguf")
    with LLM(path, devices=["numpy"], n_ctx=64, n_slots=2) as llm:
        assert llm.copy_slot(0, 1) == []
        with pytest.raises(InvalidArgument, match="slot"):
            llm.copy_slot(0, 2)
        stream = llm.stream(PROMPT[:4], max_tokens=9, slot=1, **GREEDY)
        next(stream)
        with pytest.raises(InvalidArgument, match="slot 1 is busy"):
            llm.copy_slot(0, 1)
        assert llm.copy_slot(1, 0)[:4] == PROMPT[:4]
        stream.close()  # type: ignore[attr-defined]


def test_an_erased_slot_is_empty(tmp_path: Path) -> None:
    path = write(build("llama"), tmp_path / "model.gguf")
    with LLM(path, devices=["numpy"], n_ctx=96, n_slots=2, prefix_cache=False) as llm:
        want = llm.generate(PROMPT, max_tokens=4, slot=1, **GREEDY)
        again = llm.generate(PROMPT, max_tokens=4, slot=1, **GREEDY)
        assert again.timings["prompt_n"] < len(PROMPT)
        assert llm.erase_slot(1) == PROMPT + want.tokens and llm.erase_slot(1) == []
        after = llm.generate(PROMPT, max_tokens=4, slot=1, **GREEDY)
        assert after.timings["prompt_n"] == len(PROMPT) and after.tokens == want.tokens
        stream = llm.stream(PROMPT, slot=1, **GREEDY)
        next(stream)
        with pytest.raises(InvalidArgument, match="busy"):
            llm.erase_slot(1)
        stream.close()
        with pytest.raises(InvalidArgument, match="slot"):
            llm.erase_slot(2)
