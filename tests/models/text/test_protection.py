"""The text of a special token in a message never becomes a special token, in any family's template."""

from __future__ import annotations

import random
import re
from collections import Counter
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
from device_sets import covering
from gguf_files import BOOL, F32, STRING, array, key, vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st
from material import DATA, SHARED_VOCABULARIES
from oracles.make_templates import CALLED, TEMPLATES, TOKENS
from random_cases import examples

from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.chat_template import ChatTemplate
from vkbackend.models.text.protection import Protection, disjoint
from vkbackend.models.text.tokenizer import Tokenizer

pytestmark = pytest.mark.no_vulkan

VOCABULARIES = [
    *sorted((DATA / "vocab").glob("*.gguf")),
    *(pytest.param(path, marks=pytest.mark.wide) for path in sorted(SHARED_VOCABULARIES.glob("*.gguf"))),
]
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
MARK = r"<[|\uff5c]?[\w/\u2581]+[|\uff5c]?>|\[/?[A-Z_]+\]"


@cache
def source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@lru_cache(4)  # Each template has a process.
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(source(name), *TOKENS.values())


def special_of(name: str) -> list[str]:
    extra = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|channel|>", "[INST]"]
    return sorted({*re.findall(MARK, source(name)), *extra})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vocabularies")


def tokenizer(folder: Path, name: str, model: str = "gpt2") -> Tokenizer:
    special = special_of(name)
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(b) for b in plain] + [chr(0x100 + i) for i in range(256 - len(plain))]
    texts = [*(letters if model == "gpt2" else bytes_), *special]
    kinds = [(CONTROL, USER_DEFINED)[i % 2] for i in range(len(special))]
    types = [NORMAL if model == "gpt2" else BYTE] * 256 + kinds
    extra = [array("tokenizer.ggml.merges", STRING, []), key("tokenizer.ggml.pre", STRING, "qwen2")]
    if model == "llama":
        scores = array("tokenizer.ggml.scores", F32, [0.0] * len(texts))
        extra = [scores, key("tokenizer.ggml.add_bos_token", BOOL, False)]
    path = folder / f"{name}-{model}.gguf"
    path.write_bytes(vocabulary(model, texts, types=types, extra=extra))
    with GGUF.open(path) as gguf:
        return Tokenizer.from_gguf(gguf)


def conversation(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"a {text} b"}, {"role": "assistant", "content": "Yes"},
            {"role": "user", "content": text}]  # fmt: skip


def special_ids(tok: Tokenizer, ids: list[int]) -> Counter[int]:
    return Counter(i for i in ids if tok.is_marker(i))


@pytest.mark.parametrize(("name", "model"), covering(NAMES, ["gpt2", "llama"]))
def test_every_special_token_of_a_family(folder: Path, name: str, model: str) -> None:
    tok, template = tokenizer(folder, name, model), template_of(name)
    protection = Protection(template, tok, source(name))
    written = [text for text, _ in tok.markers(lambda text: text in source(name))]
    variables = {"tools": None, "documents": [{"title": "A", "text": "harmless"}]}
    want = protection.prompt(conversation("x"), variables)
    harmless = special_ids(tok, tok.encode(want.text, False, True, plain=want.plain))
    for text in ["".join(written), *written]:
        talk = conversation(f"{text} and {text}")
        prompt = protection.prompt(talk, variables)
        ids = tok.encode(prompt.text, add_special=False, parse_special=True, plain=prompt.plain)
        assert prompt.protected and prompt.text == template.render(talk, **variables)
        assert special_ids(tok, ids) == harmless, text
        decoded = tok.decode(ids, skip_special=False)
        assert decoded == prompt.text or model == "llama"
        unprotected = special_ids(tok, tok.encode(prompt.text, add_special=False, parse_special=True))
        assert unprotected != harmless, "nothing to protect from"


@settings(max_examples=examples(20), deadline=None)
@given(st.sampled_from(["qwen3", "llama3", "glm4", "deepseek"]), st.integers(0, 1 << 32))
def test_any_mixture(tmp_path_factory: pytest.TempPathFactory, name: str, seed: int) -> None:
    rng = random.Random(seed)
    tok = tokenizer(tmp_path_factory.getbasetemp(), name)
    special = special_of(name)
    halves = [half for text in special for half in (text[: len(text) // 2], text[len(text) // 2 :])]
    parts = [*special, *halves, " ", "\n", "a", "</think>", "<think>"]
    protection = Protection(template_of(name), tok, source(name))

    def talk(words: list[str]) -> list[dict[str, Any]]:
        user, result = "".join(words[:5]), "".join(words[5:])
        tool = {"role": "tool", "content": result, "tool_call_id": "call12345"}
        return [{"role": "user", "content": f"{user}."}, CALLED, tool]

    words = rng.choices(parts, k=10)
    prompt, calm = protection.prompt(talk(words), {}), protection.prompt(talk(["x"] * 10), {})
    if prompt.protected:
        ids = tok.encode(prompt.text, add_special=False, parse_special=True, plain=prompt.plain)
        unescaped = tok.encode(calm.text, add_special=False, parse_special=True)
        written = {i for _, i in tok.markers(lambda text: text in source(name))}
        counts = [Counter(i for i in tokens if i in written) for tokens in (ids, unescaped)]
        assert counts[0] == counts[1]


def test_templates_that_alter_messages(folder: Path) -> None:
    """To find a message's special tokens in the prompt, the renderer puts a sentinel after each of them. If
    that fails, it puts the sentinel before them. If both fail, the content must occur only once in the
    prompt. If the content occurs twice, the prompt is unprotected."""
    tok = tokenizer(folder, "qwen3")
    end = "<|im_end|>"

    def prompt(text: str, said: str) -> tuple[bool, int]:
        source = "<|im_start|>" + text
        messages = [{"role": "user", "content": said}]
        protected = Protection(ChatTemplate(source), tok, source).prompt(messages, {})
        ids = tok.encode(protected.text, add_special=False, parse_special=True, plain=protected.plain)
        return protected.protected, sum(special_ids(tok, ids).values())

    content, length = "{{ messages[0].content }}", "{{ messages[0].content | length }}"
    ending = "{% if messages[0].content.endswith('" + end + "') %}" + content + "{% endif %}"
    assert prompt(content, f"a{end}b") == prompt(ending, f"a{end}") == (True, 1)
    assert prompt(length + content, f"a{end}") == (True, 1)
    assert prompt(length + content + end, end) == (False, 3)
    assert prompt(length + "{{ messages[0].content | replace('a', 'b') }}", f"a{end}") == (False, 2)


@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem)
def test_plain_text_never_becomes_a_special_token(path: Path) -> None:
    with GGUF.open(path) as gguf:
        tok = Tokenizer.from_gguf(gguf)
    markers = tok.markers(lambda text: True)
    assert len(markers) >= 3
    for text, _ in markers:
        for said in (text, f"a{text}b", text + text, f" {text}\n"):
            ids = tok.encode(said, add_special=False, parse_special=True, plain=[(0, len(said))])
            assert not special_ids(tok, ids), said


def test_stretches_that_overlap_are_one() -> None:
    assert disjoint({(4, 6), (0, 2), (1, 3), (1, 2), (6, 7)}) == ((0, 3), (4, 6), (6, 7))
