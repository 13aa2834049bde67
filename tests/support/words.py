"""A vocabulary of 40 words and bytes for a runner without a model, and an LLM on this runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vkbackend import LLM

WORDS = [f"\u2581w{i}." for i in range(32)]
TOKENS = ["<unk>", "<s>", "</s>", "<0xE2>", "<0x98>", "<0x83>", "<0x41>", "<0x42>", *WORDS]
ENDS = [2]
TYPES = [2, 3, 3, *[6] * 5, *[1] * 32]
Make = Callable[..., LLM]


def engine_of(llm: LLM) -> Any:
    return llm._mailbox.channel.engine._engine  # type: ignore[union-attr]
