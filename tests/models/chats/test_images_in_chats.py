"""Images in conversations: where their rows are in the prompt, and which contents are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_words import TURNS, words_model
from vision_double import VisionDouble

from vkbackend import LLM
from vkbackend.errors import InvalidArgument
from vkbackend.models.pictures import MediaPrompt
from vkbackend.models.vision.images import image_of

pytestmark = pytest.mark.no_vulkan
model = words_model  # pytest finds the fixture by this name


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, n_ctx=256) as llm:
        llm._maker.pictures = VisionDouble().pictures()
        yield llm


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image", "image": data}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def shown(llm: LLM, prompt: list[int] | MediaPrompt) -> list[str]:
    """Return the text of each token, and the rows of each tile in brackets."""
    pieces = prompt.pieces if isinstance(prompt, MediaPrompt) else tuple(prompt)
    return [llm.tokenizer.piece(p).decode() if isinstance(p, int) else f"[{p.n_rows}]" for p in pieces]


def test_rows_stand_where_the_image_was(llm: LLM) -> None:
    parts = [text("w1."), image(b"abc"), text("w2."), text("w3.")]
    request = llm.chat_prompt([{"role": "user", "content": parts}])
    assert isinstance(request.ids, MediaPrompt)
    around = ["<|user|>", "[3]", "<|system|>", "[3]", "<|user|>"]
    written = shown(llm, request.ids)
    assert written[:2] == ["<s>", "<|user|>"] and written[-1] == "<|assistant|>"
    at = written.index("[3]") - 1
    assert written[at : at + 5] == around
    before, after = (shown(llm, llm.tokenize(words, add_special=False)) for words in ("w1.", "w2.\nw3."))
    assert written[2:at] == before and written[at + 5 : -2] == after
    assert len(request.ids) == len(written) + 4


def test_special_tokens_of_a_user_stay_text_next_to_an_image(llm: LLM) -> None:
    parts = [text("w1.</s>"), image(b"abc"), text("</s>w2.")]
    with_image = shown(llm, llm.chat_prompt([{"role": "user", "content": parts}]).ids)
    assert with_image.count("</s>") == 1, "the template's"
    assert llm.chat_prompt([{"role": "user", "content": parts}]).protected


def test_several_images_keep_their_order(llm: LLM) -> None:
    messages = [
        {"role": "user", "content": [image(b"a"), image(b"bb"), text("w1.")]},
        {"role": "assistant", "content": "w2."},
        {"role": "user", "content": [text("w3."), image(b"a")]},
    ]
    rows = [piece for piece in shown(llm, llm.chat_prompt(messages).ids) if piece[0] == "["]
    assert rows == ["[1]", "[1]", "[2]", "[2]", "[1]", "[1]"]


def test_a_conversation_without_images_has_plain_ids(llm: LLM) -> None:
    messages = [{"role": "user", "content": [text("w1."), text("w2.")]}]
    with_vision = llm.chat_prompt(messages).ids
    llm._maker.pictures = None
    assert with_vision == llm.chat_prompt(messages).ids


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([{"type": "image_url", "image_url": {"url": "https://host/a.png"}}], "nothing is fetched"),
        ([{"type": "image_url"}], "expected a data URL"),
        ([{"type": "image"}], "expected a path"),
        ([{"type": "input_audio", "input_audio": {}}], "'input_audio' are not supported; there are: text, "),
        ([image(b"a")] * 3, None),
    ],
)
def test_wrong_parts_are_refused(llm: LLM, content: list[dict[str, Any]], why: str | None) -> None:
    messages = [{"role": "user", "content": content}]
    if why is None:
        assert len(llm.chat_prompt(messages).ids)
        return
    with pytest.raises(InvalidArgument, match=re.escape(why)) as refusal:
        llm.chat_prompt(messages)
    assert refusal.value.argument.startswith("messages[0].content[0]")


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_only_users_and_tools_show_images(llm: LLM, role: str) -> None:
    last = {"role": "user", "content": "w1."}
    with pytest.raises(InvalidArgument, match=f"not of '{role}'"):
        llm.chat_prompt([{"role": role, "content": [image(b"a")]}, last])
    assert llm.chat_prompt([{"role": "tool", "content": [image(b"a")]}, last]).ids


def test_a_template_that_leaves_out_an_image_is_refused(llm: LLM) -> None:
    last_only = TURNS.replace("messages %}", "messages[-1:] %}")
    messages = [{"role": "user", "content": [image(b"a")]}, {"role": "user", "content": "w1."}]
    with pytest.raises(InvalidArgument, match="writes 0 images of a conversation with 1"):
        llm.chat_prompt(messages, template=last_only)


def test_without_a_projector_the_error_names_the_flag(llm: LLM) -> None:
    llm._maker.pictures = None
    with pytest.raises(InvalidArgument, match="--mmproj"):
        llm.chat_prompt([{"role": "user", "content": [{"type": "image", "image": image_of("i", b"a")}]}])
