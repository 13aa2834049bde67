"""Vocabularies for tests: files of `tests/data/vocab`, real files next to the checkout, and parts of small
vocabularies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from gguf_files import F32, STRING, array, key
from material import DATA, SHARED_VOCABULARIES

from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.tokenizer import Tokenizer

SPM, BYTES, QWEN2 = OWN = [DATA / "vocab" / f"{name}.gguf" for name in ("llama-spm", "llama-bpe", "qwen2")]
THEIRS = [
    path for vocabulary in OWN if (path := SHARED_VOCABULARIES / f"ggml-vocab-{vocabulary.name}").is_file()
]
Build = Callable[..., Tokenizer]  # the type of the fixture `build`(model, tokens, extra keys, types=...)


@cache
def load(path: Path) -> Tokenizer:
    with GGUF.open(path) as g:
        return Tokenizer.from_gguf(g)


def byte_tokens() -> list[str]:
    return [f"<0x{b:02X}>" for b in range(256)]


def spm_extra(n: int, scores: Sequence[float] | None = None) -> list[bytes]:
    return [array("tokenizer.ggml.scores", F32, scores if scores is not None else [0.0] * n)]


def bpe_extra(merges: Sequence[str | bytes], pre: str = "gpt-2") -> list[bytes]:
    return [array("tokenizer.ggml.merges", STRING, merges), key("tokenizer.ggml.pre", STRING, pre)]
