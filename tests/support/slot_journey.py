"""Checks a slot that returns to a prefix, is copied and saved, and is loaded on other devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oracles.fixture import PROMPT

from vkbackend import LLM


def check_slot_journey(path: Path, state: Path, **options: Any) -> None:
    """Check that the slot, on three devices and then on two, generates the same tokens as a new slot on one
    device. The file of the saved slot remains at `state`."""
    prompt = PROMPT[:30]
    other, few = [*prompt, 7, 8, 9], {"temperature": 0, "ignore_eos": True}
    with LLM(path, devices=["numpy"], **options) as llm:
        want = [llm.generate(text, 6, **few).tokens for text in (prompt, other)]
        third = llm.generate([*other, *want[1]], 6, **few).tokens
    with LLM(path, devices=["numpy"] * 3, tensor_split=[3, 0, 2], n_slots=2, n_ubatch=16, **options) as llm:
        assert llm.generate(prompt, 6, slot=0, **few).tokens == want[0]
        back = llm.generate(other, 6, slot=0, **few)
        assert back.tokens == want[1] and back.timings["prompt_n"] == 3
        llm.copy_slot(0, 1)
        copied = llm.generate([*other, *want[1]], 6, slot=1, **few)
        assert copied.tokens == third and copied.timings["prompt_n"] == 1
        llm.save_state(state, slot=0)
    with LLM(path, devices=["numpy"] * 2, n_slots=2, **options) as llm:
        loaded = llm.generate(llm.load_state(state, slot=1), 6, slot=1, **few)
        assert loaded.tokens == third and loaded.timings["prompt_n"] == 1
