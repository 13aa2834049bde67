"""The tokenizers of Gemma 4 and Kimi K2 return the same ids as other programs.

`oracles/make_tokenizers.py` stored the vocabularies and ids in `golden/`. `pytest -m oracle` computes them
again with the installed programs.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gguf_files import BOOL, STRING, array, key, vocabulary
from oracles import make_tokenizers

from vkbackend.errors import GGUFError
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.tokenizer import Tokenizer, TokenType

KINDS = {"gemma4": "gemma4", "kimi-k2": "gpt2"}


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    kept = json.loads(
        (make_tokenizers.GOLDEN / f"tokenizer-{request.param}.json").read_text(encoding="utf-8")
    )
    with GGUF.open(make_tokenizers.write(tmp_path / "v.gguf", KINDS[request.param], kept)) as gguf:
        return Tokenizer.from_gguf(gguf), kept


def test_ids(case: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, kept = case
    assert kept["texts"] == make_tokenizers.texts() and len(kept["texts"]) > 150
    for text, ids in zip(kept["texts"], kept["ids"], strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, repr(text)
    for text, ids in zip(kept["texts"], kept.get("parsed", []), strict=False):
        assert tokenizer.encode(text, parse_special=True) == ids, repr(text)
    assert tokenizer.add_bos == kept["add_bos"]


def test_round_trips(case: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, kept = case
    for text in kept["texts"]:
        want = text.replace("\u2581", " ") if kept["pre"] == "gemma4" else text
        assert tokenizer.decode(tokenizer.encode(text)) == want


def test_pieces_and_ends(case: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, kept = case
    assert [tokenizer.piece(i).hex() for i in range(tokenizer.n_vocab)] == kept["pieces"]
    assert sorted(tokenizer.stop_ids) == kept["ends"]


def test_characters_without_a_token_need_bytes(tmp_path: Path) -> None:
    extra = [array("tokenizer.ggml.merges", STRING, []), key("tokenizer.ggml.add_bos_token", BOOL, False)]

    def build(*tokens: str) -> Tokenizer:
        types = [TokenType.NORMAL] * len(tokens)
        unknown = [key("tokenizer.ggml.unknown_token_id", 4, 0)] if tokens[0] == "<unk>" else []
        (tmp_path / "v.gguf").write_bytes(vocabulary("gemma4", tokens, types=types, extra=[*extra, *unknown]))
        with GGUF.open(tmp_path / "v.gguf") as gguf:
            return Tokenizer.from_gguf(gguf)

    with pytest.raises(GGUFError, match="neither all byte tokens nor an unknown token"):
        build("a", "b")
    tokenizer = build("<unk>", "a", "\u2581")
    assert tokenizer.encode("a ü a") == [1, 2, 0, 2, 1] and not tokenizer.add_bos


@pytest.mark.oracle
@pytest.mark.parametrize("name", KINDS)
def test_stored_ids_equal_the_installed_programs(name: str) -> None:
    needed = ("transformers", "xllamacpp") if name == "gemma4" else ("tiktoken", "xllamacpp")
    if missing := [p for p in needed if find_spec(p) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    generated = {"gemma4": make_tokenizers.gemma4, "kimi-k2": make_tokenizers.kimi_k2}[name]()
    kept = json.loads((make_tokenizers.GOLDEN / f"tokenizer-{name}.json").read_text(encoding="utf-8"))
    assert {**generated, "about": None} == {**kept, "about": None}
