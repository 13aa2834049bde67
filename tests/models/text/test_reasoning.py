from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import examples

from vkbackend.models.text.reasoning import ReasoningSplit, opened, split

pytestmark = pytest.mark.no_vulkan

CASES = {
    "plain": ("An answer", False, "", "An answer"),
    "qwen": ("<think>\nHm\n</think>\n\nYes", False, "Hm", "\n\nYes"),
    "opened by the template": ("Hm\n</think>\n\nYes", True, "Hm", "\n\nYes"),
    "never closed": ("<think>Hm <think", False, "Hm <think", ""),
    "spoken of": ("Use <think> here</think>", False, "", "Use <think> here</think>"),
    "white space": (" \n[THINK]a[/THINK]b", False, "a", "b"),
    "gpt-oss": (
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes",
        False,
        "Hm",
        "Yes",
    ),
    "gpt-oss without a thought": ("<|channel|>final<|message|>Yes", False, "", "Yes"),
    "half a marker": ("a <|cha", False, "", "a <|cha"),
    "markers of others": (
        "The <|end|> of <|start|>assistant",
        False,
        "",
        "The <|end|> of <|start|>assistant",
    ),
    "gemma 4": ("<|channel>thought\nHm<channel|>Yes", False, "Hm", "Yes"),
    "gpt-oss, JSON": ("<|channel|>final <|constrain|>json<|message|>{}", False, "", "{}"),
    "gpt-oss, a tool of its own": (
        "<|channel|>analysis to=python code<|message|>1+1<|call|>"
        "<|start|>assistant<|channel|>final<|message|>2",
        False,
        "1+1",
        "2",
    ),
    "gpt-oss, no header": ("Yes <b", False, "", "Yes <b"),
}


@pytest.mark.parametrize("name", CASES)
def test_thoughts_and_answers(name: str) -> None:
    text, thinking, thought, answer = CASES[name]
    assert split(text, thinking, "gpt-oss" in name) == (thought, answer)


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(sorted(CASES)), st.data())
def test_the_size_of_pieces_changes_nothing(name: str, data: st.DataObject) -> None:
    text, thinking, thought, answer = CASES[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    splitter, thoughts, answers = ReasoningSplit(thinking, "gpt-oss" in name), "", ""
    for i, part in enumerate(parts):
        for piece in splitter.push(part, last=i == len(parts) - 1):
            thoughts, answers = (
                thoughts + piece.text * piece.is_thought,
                answers + piece.text * (not piece.is_thought),
            )
    assert (thoughts.strip(), answers) == (thought, answer)


def test_a_prompt_may_end_in_a_thought() -> None:
    assert opened("<|im_start|>assistant\n<think>\n") and not opened("<think>\n\n</think>\n\n")
