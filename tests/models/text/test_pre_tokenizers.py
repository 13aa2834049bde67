"""Pre-tokenizers split as llama.cpp does, or as the model's own expression does. `golden/` stores the
expected ids."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from device_sets import some
from gguf_files import STRING, string, with_keys
from oracles import make_pre_tokenizers as oracle

from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.pre_tokenizers import LINE_TOKENIZERS, PRE_TOKENIZERS
from vkbackend.models.text.tokenizer import Tokenizer

pytestmark = pytest.mark.no_vulkan

KEPT = json.loads(oracle.FILE.read_text(encoding="utf-8"))
LLAMA_CPP = """
    a.x-4.0 afmoe bailingmoe bailingmoe2 bloom chameleon chatglm-bpe codeshell cohere2moe command-r dbrx
    deepseek-coder deepseek-llm deepseek-r1-qwen deepseek-v3 default exaone exaone-moe exaone4 f2llmv2
    falcon falcon-h1 falcon3 gemma4 gigachat glm4 glm5 gpt-2 gpt-4o gpt3-finnish granite-docling
    granite-embed-multi-311m granite-embed-multi-97m grok-2 hunyuan hunyuan-dense hy_v4 jais jais-2
    jina-de jina-es jina-v1-en jina-v2-code jina-v2-de jina-v2-es jina-v5-nano joyai-llm k2-horizon
    kanana2 kimi-k2 kormo laguna lfm2 llada-moe llama-bpe llama-v3 llama3 llama4 megrez mellum mellum2
    midm-2.0 minerva-7b minicpm5 minimax-m2 mmbert modern-bert mpt olmo phi-2 pixtral poro-chat qwen2
    qwen35 refact roberta-bpe sarvam-moe seed-coder smaug-bpe smollm solar-open spark2_5 stablelm2
    starcoder superbpe talkie tekken tiny_aya trillion ufakzeka viking youtu
""".split()


def test_names() -> None:
    """vkbackend and xllamacpp 2026.10 have the same names of pre-tokenizers. "whitespace" is a separate kind
    of tokenizer here."""
    assert sorted({*PRE_TOKENIZERS, *LINE_TOKENIZERS, *LLAMA_CPP}) == LLAMA_CPP
    assert sorted(KEPT["found"]) == sorted(oracle.names())


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GGUF]:
    path = tmp_path_factory.mktemp("pairs") / "v.gguf"
    with GGUF.open(oracle.write(path, "gpt-2", *oracle.pairs_of(KEPT["lines"]))) as gguf:
        yield gguf


@pytest.mark.parametrize("name", some(KEPT["found"], 2))
def test_ids(name: str, vocabulary: GGUF, tmp_path: Path) -> None:
    kept, lines = KEPT["found"][name], KEPT["lines"]
    path = tmp_path / "v.gguf"
    path.write_bytes(with_keys(vocabulary, {"tokenizer.ggml.pre": struct.pack("<I", STRING) + string(name)}))
    with GGUF.open(path) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf)
    assert tokenizer.add_bos == kept["add_bos"]
    compared = [(line, ids) for line, ids in zip(lines, kept["ids"], strict=True) if ids is not None]
    assert len(compared) >= 8
    for line, ids in compared:
        assert tokenizer.encode(line, add_special=False) == ids, repr(line)


@pytest.mark.oracle
@pytest.mark.parametrize("name", [name for name in KEPT["found"] if name not in oracle.ORIGINALS])
def test_llama_cpp_still_says_so(name: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    kept = KEPT["found"][name]
    ids, add_bos = oracle.of_llama_cpp(name, KEPT["lines"], tmp_path)
    assert [row and got for row, got in zip(kept["ids"], ids, strict=True)] == kept["ids"]
    assert add_bos == kept["add_bos"]


@pytest.mark.oracle
@pytest.mark.parametrize("name", oracle.ORIGINALS)
def test_stored_ids_equal_the_published_expressions(name: str) -> None:
    assert oracle.of_originals(name, KEPT["lines"]) == KEPT["found"][name]["ids"]
