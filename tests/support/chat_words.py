"""A vocabulary of words and of the markers in TURNS, for a runner without a model."""

from __future__ import annotations

import sys
from pathlib import Path

import fake_runner
import pytest
from gguf_files import F32, STRING, array, key, vocabulary

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}<|assistant|>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
WORDS = [f"\u2581w{i}." for i in range(32)]
TOKENS = ["<unk>", "<s>", "</s>", *ROLES, "<0x41>", "<0x42>", *WORDS]
TYPES = [2, 3, 3, 3, 3, 3, 6, 6, *[1] * 32]


@pytest.fixture
def words_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(sys.modules, "vkbackend.models.engine.runner.runner", fake_runner.MODULE)
    scores = array("tokenizer.ggml.scores", F32, [0.0] * len(TOKENS))
    extra = [scores, key("tokenizer.chat_template", STRING, TURNS)]
    path = tmp_path / "words.gguf"
    path.write_bytes(vocabulary("llama", TOKENS, types=TYPES, extra=extra))
    return path
