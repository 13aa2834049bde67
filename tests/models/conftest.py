from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_runner
import pytest
from gguf_files import F32, array, vocabulary
from words import TOKENS, TYPES, Make

from vkbackend import LLM


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(sys.modules, "vkbackend.models.engine.runner.runner", fake_runner.MODULE)
    extra = [array("tokenizer.ggml.scores", F32, [0.0] * len(TOKENS))]
    path = tmp_path / "words.gguf"
    path.write_bytes(vocabulary("llama", TOKENS, types=TYPES, extra=extra))
    return path


@pytest.fixture
def make(model: Path) -> Iterator[Make]:
    opened: list[LLM] = []

    def open_llm(**options: Any) -> LLM:
        opened.append(LLM(model, **{"n_ctx": 64, **options}))
        return opened[-1]

    yield open_llm
    for llm in opened:
        llm.close()
