"""Damaged GGUF files, and damaged files of the prefix cache."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from gguf_files import BOOL, F32, STRING, array, key, string, vocabulary
from gguf_reading import read_everything, sample
from material import DATA

from fuzz.damage import damaged
from fuzz.kind import Wrong
from vkbackend.errors import VkbackendError
from vkbackend.models.engine.cache import block_files
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.tokenizer import Tokenizer, chat_templates, end_ids

TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "a", "b", "ab", "<x>"]
TYPES = [2, 3, 3, *[6] * 256, 1, 1, 1, 4]
PIECES = (
    key("general.alignment", 4, 1 << 20), key("tokenizer.chat_template", STRING, "{{ 1 }}"),
    array("tokenizer.ggml.token_type", 5, [3] * 4), string("general.architecture"),
    key("tokenizer.ggml.eos_token_id", 4, 1 << 31), key("tokenizer.ggml.add_bos_token", BOOL, True),
)  # fmt: skip


def tokens_of(model: str) -> bytes:
    """Return a file with a vocabulary of 263 tokens."""
    scores = array("tokenizer.ggml.scores", F32, [0.0] * len(TOKENS))
    merges = array("tokenizer.ggml.merges", STRING, ["a b"])
    return vocabulary(model, TOKENS, types=TYPES, extra=[scores, merges])


def read_text(gguf: GGUF) -> None:
    chat_templates(gguf)
    end_ids(gguf)
    Tokenizer.from_gguf(gguf).encode("ab <x>", parse_special=True)


class Files:
    """Damaged GGUF files. A case reads all of the file, including the tokenizer."""

    deadline_s = 20.0

    def __init__(self, folder: Path) -> None:
        self._path = folder / "any.gguf"
        self._sources = [sample(), *(tokens_of(model) for model in ("llama", "gpt2", "gemma4", "t5", "rwkv"))]
        self._sources += [(DATA / "vocab" / "qwen2.gguf").read_bytes()]

    def make(self, rng: random.Random) -> bytes:
        return damaged(rng, rng.choice(self._sources), PIECES)

    def check(self, case: bytes) -> str:
        self._path.write_bytes(case)
        try:
            read_everything(self._path)
            with GGUF.open(self._path) as gguf:
                read_text(gguf)
        except VkbackendError:
            return "refused"
        return "accepted"


class Blocks:
    """A damaged file of the prefix cache must be refused, or must still have the content that was written."""

    deadline_s = 20.0

    def __init__(self, folder: Path) -> None:
        self._folder, self._name = folder / "kv", "a" * 64 + ".0"
        self._content = np.random.default_rng(3).bytes(3000)
        files = block_files.BlockFiles(str(self._folder), b"i" * 32, 1 << 30)
        files.write(self._name, self._content, 0)
        files.flush(60)
        self._path = files.folder / self._name
        self._whole = self._path.read_bytes()
        files.close()

    def make(self, rng: random.Random) -> bytes:
        return damaged(rng, self._whole, (block_files.KIND, self._whole[:80]))

    def check(self, case: bytes) -> str:
        self._path.write_bytes(case)
        files = block_files.BlockFiles(str(self._folder), b"i" * 32, 1 << 30)
        try:
            content = files.begin_read(self._name, len(self._content), 0).result(10)
        finally:
            files.close()
        if content not in (None, self._content):
            raise Wrong("other content was accepted")
        return "refused" if content is None else "accepted"
