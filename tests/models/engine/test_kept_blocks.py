"""Models continue from blocks of the KV cache that an earlier process stored in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import wide
from oracles.fixture import N_VOCAB, write
from oracles.fixtures import FIXTURES, build

from vkbackend import LLM
from vkbackend.ops import CELL_BLOCK

PROMPT = np.random.default_rng(5).integers(0, N_VOCAB, 138).tolist()
OPTIONS: dict[str, Any] = {"n_ctx": 192, "n_ubatch": 64, "type_k": "f32", "type_v": "f32"}
QUICK = "llama", "gpt-oss", "qwen35"
Answer = tuple[list[int], list[list[float]], int]  # tokens, log probabilities, computed tokens of the prompt


def answer(
    path: Path, folder: Path | None, devices: list[str], tokens: list[int] = PROMPT, **how: Any
) -> Answer:
    with LLM(path, devices=devices, cache_disk=folder, **OPTIONS | how) as llm:
        said = llm.generate(tokens, max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)
    assert said.logprobs is not None
    rows = [[value for _, value in row.top] for row in said.logprobs]
    return said.tokens, rows, said.timings["prompt_n"]


@pytest.mark.parametrize("name", [n if n in QUICK else wide(pytest.param(n, id=n)) for n in FIXTURES])
def test_equal_logits_after_a_restart(tmp_path: Path, name: str) -> None:
    """The steps after the restored blocks have the same rows as in a fresh run, so the logits have the same
    bits."""
    path = write(build(name), tmp_path / "model.gguf")
    tokens, logits, computed = answer(path, None, ["numpy"] * 2)
    assert computed == len(PROMPT)
    assert answer(path, tmp_path / "kv", ["numpy"] * 2) == (tokens, logits, computed)
    again = answer(path, tmp_path / "kv", ["numpy"] * 2)
    assert again == (tokens, logits, len(PROMPT) % CELL_BLOCK)
