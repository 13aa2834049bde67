"""Fixtures that make tokenizers from files and vocabularies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from device_sets import wide
from gguf_files import vocabulary
from vocabularies import OWN, THEIRS, Build, load

from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.tokenizer import Tokenizer


@pytest.fixture(params=[*OWN, *map(wide, map(pytest.param, THEIRS))], ids=lambda path: path.stem)
def real(request: pytest.FixtureRequest) -> Tokenizer:
    return load(request.param)


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def make(
        model: str, tokens: Sequence[str | bytes], extra: Iterable[bytes] = (), **types: Sequence[int]
    ) -> Tokenizer:
        (tmp_path / "v.gguf").write_bytes(vocabulary(model, tokens, extra=extra, **types))
        with GGUF.open(tmp_path / "v.gguf") as g:
            return Tokenizer.from_gguf(g)

    return make
