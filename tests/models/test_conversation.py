from __future__ import annotations

import re
import struct
from pathlib import Path

import fake_runner
import pytest
from chat_words import TOKENS, TURNS, words_model
from gguf_files import U32, key

from vkbackend import LLM
from vkbackend.errors import InvalidArgument
from vkbackend.models.conversation import Chat
from vkbackend.models.text.chat_template import ChatTemplate

model = words_model  # pytest finds the fixture by this name


# ---- the template ----


def test_templates_get_the_variables_of_hugging_face() -> None:
    source = """
{%- for m in messages %}
    {%- if loop.index0 > 1 %}{% break %}{% endif %}
    {% if m.role == "user" %}
{{ bos_token }}[{{ m.content | trim }}]{{ eos_token }}
    {% endif %}
{%- endfor %}{{ {"a": "<é>"} | tojson }}{% if add_generation_prompt %}>{% endif %}"""
    source += "{% generation %}{% if tools is none and not documents %}!{% endif %}{% endgeneration %}"
    users = [{"role": "user", "content": f" {i} "} for i in range(3)]
    assert ChatTemplate(source, "<s>", "</s>").render(users) == '<s>[0]</s>\n<s>[1]</s>\n{"a": "<é>"}>!'
    assert re.fullmatch("20[0-9]{2}", ChatTemplate("{{ strftime_now('%Y') }}").render(users))
    dates = ChatTemplate("{{ strftime_now('%d %b %Y') }}|{{ date_string }}|{{ datetime }}").render(users)
    assert re.fullmatch(r"(\d\d [A-Z][a-z]{2} 20\d\d)\|\1\|[A-Z][a-z]{2} \d\d 20\d\d", dates)
    assert ChatTemplate("{{ date_string }}").render(users, date_string="today") == "today"


def test_json_takes_the_arguments_of_hugging_face() -> None:
    value = "{{ {'b': 'é', 'a': [1]} | tojson(%s) }}"
    cases = {
        "": '{"b": "é", "a": [1]}',
        "true": '{"b": "\\u00e9", "a": [1]}',  # the first positional argument is ensure_ascii
        "ensure_ascii=true, sort_keys=true": '{"a": [1], "b": "\\u00e9"}',
        "separators=(',', ':')": '{"b":"é","a":[1]}',
        "false, 1": '{\n "b": "é",\n "a": [\n  1\n ]\n}',
    }
    for arguments, text in cases.items():
        assert ChatTemplate(value % arguments).render([]) == text


def test_templates_that_loop_over_tools_without_asking() -> None:
    """Without tools, transformers passes `tools=None`. The templates of Hermes 2 and 3 and Command R+ cannot
    loop over None."""
    looped = ChatTemplate("{% for t in tools %}{{ t.name }},{% endfor %}{{ tools | default('none') }}")
    assert looped.render([]) == "none" and looped.render([], tools=[{"name": "f"}])[:2] == "f,"
    assert ChatTemplate("{{ documents is none }}").render([]) == "True"
    refused = ChatTemplate("{% if tools is none %}{{ raise_exception('tools, please') }}{% endif %}")
    with pytest.raises(InvalidArgument, match="tools, please"):
        refused.render([])
    with pytest.raises(InvalidArgument, match="'NoneType' object is not iterable"):
        ChatTemplate("{% for t in tools %}{% endfor %}{{ 1 // 0 }}").render([])


@pytest.mark.parametrize(
    ("source", "pattern"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages.__class__.__mro__ }}", "__class__|unsafe"),
        ("{{ messages.append(1) }}", "append|unsafe"),
        ("{{ messages[9].content }}", "no element 9"),
        ("{{ 1 // 0 }}", "division"),
        ("{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}", "more than 4194304"),
        ("{% for %}", "not valid"),
        ("x" * (1 << 20) + "x", "1048577 characters"),
    ],
    ids=lambda text: text[:20],
)
def test_a_failing_template_is_a_typed_error(source: str, pattern: str) -> None:
    with pytest.raises(InvalidArgument, match=pattern):
        ChatTemplate(source).render([{"role": "user", "content": "a"}])


# ---- a conversation, on a runner without a model ----


def ids(llm: LLM, text: str) -> list[int]:
    return [1, *llm.tokenize(text, add_special=False, parse_special=True)]


def test_a_turn_computes_only_new_tokens(model: Path) -> None:
    with LLM(model, n_ctx=200) as llm:
        chat = Chat(llm, "w1.")
        first = list(chat.send("w2. w3.", 6, temperature=0, ignore_eos=True))
        asked = ids(llm, "<|system|>w1.</s><|user|>w2. w3.</s><|assistant|>")
        assert [c.token for c in first] == fake_runner.continuation(asked, 6, [2])
        assert first[-1].timings is not None and first[-1].timings["prompt_n"] == len(asked)
        second = list(chat.send("w4.", 6, temperature=0, ignore_eos=True))
        held = [*asked, *(c.token for c in first if c.token is not None)]
        asked = [*held, *ids(llm, "</s><|user|>w4.</s><|assistant|>")[1:]]
        assert [c.token for c in second] == fake_runner.continuation(asked, 6, [2])
        assert second[-1].timings is not None and second[-1].timings["prompt_n"] == len(asked) - len(held) + 1
        assert [m["role"] for m in chat.messages] == ["system", *2 * ["user", "assistant"]]
        chat.clear()
        again = list(chat.send("w2. w3.", 6, temperature=0, ignore_eos=True))
        assert [c.token for c in again] == [c.token for c in first]


def test_a_beginning_token_need_not_be_text(model: Path) -> None:
    """A template may write special tokens as text. BOS is a byte token in this test, so it has no text."""
    raw = model.read_bytes().replace(b"<0x41>", b"<0xFF>")
    extra = key("tokenizer.ggml.bos_token_id", U32, TOKENS.index("<0x41>"))
    n_keys = struct.unpack_from("<Q", raw, 16)[0] + 1
    model.write_bytes(raw[:16] + struct.pack("<Q", n_keys) + extra + raw[24:])
    with LLM(model, n_ctx=64) as llm:
        chat = Chat(llm, template="{{ bos_token }}{{ messages[0].content }}")
        assert chat._prompts._template.render([{"role": "user", "content": "a"}]) == "\ufffda"


def test_a_closed_answer_is_stored_and_a_stop_string_keeps_the_tokens_right(model: Path) -> None:
    with LLM(model, n_ctx=200) as llm:
        chat = Chat(llm)
        stream = chat.send("w1.", temperature=0, ignore_eos=True)
        said = [next(stream), next(stream)]
        stream.close()
        assert chat.messages[1]["content"] == "".join(c.text for c in said)
        plain = "".join(c.text for c in chat.send("w2.", 8, temperature=0, ignore_eos=True))
        chat.clear()
        list(chat.send("w1.", 2, temperature=0, ignore_eos=True))
        stop = plain[5:8]
        cut = "".join(c.text for c in chat.send("w2.", 8, temperature=0, ignore_eos=True, stop=stop))
        assert cut == plain[: plain.index(stop)]
        before = "<|user|>w1.</s><|assistant|>" + chat.messages[1]["content"]
        asked = ids(llm, f"{before}</s><|user|>w2.</s><|assistant|>{cut}</s><|user|>w3.</s><|assistant|>")
        third = [c.token for c in chat.send("w3.", 4, temperature=0, ignore_eos=True)]
        assert third == fake_runner.continuation(asked, 4, [2])


def test_a_message_that_does_not_fit_is_forgotten(model: Path) -> None:
    with LLM(model, n_ctx=24) as llm:
        chat = Chat(llm)
        with pytest.raises(InvalidArgument, match="the context holds 24"):
            chat.send("w1. " * 30)
        assert chat.messages == [] and len(list(chat.send("w1.", 3, temperature=0, ignore_eos=True))) == 3


def test_texts_of_special_tokens_in_messages_are_plain(model: Path) -> None:
    with LLM(model, n_ctx=200) as llm:
        asked = list[list[int]]()
        stream = llm.stream
        llm.stream = lambda ids, *rest, **how: asked.append(ids) or stream(ids, *rest, **how)  # type: ignore
        for parse_special, n in ((False, 1), (True, 2)):
            chat = Chat(llm, parse_special=parse_special)
            for turn in (1, 2):
                list(chat.send("A<|user|>B", 4, temperature=0, ignore_eos=True))
                assert asked[-1].count(TOKENS.index("<|user|>")) == n * turn and chat.protected
        upper = Chat(llm, template="{{ messages[0].content | upper }}{{ messages | length }}")
        list(upper.send("a</s>", 1))
        assert not upper.protected


def test_a_model_without_a_template(model: Path) -> None:
    model.write_bytes(model.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_templote"))
    with LLM(model, n_ctx=300) as llm:
        assert llm.chat_template is None
        said = list(Chat(llm, template=TURNS).send("w1.", 3, temperature=0, ignore_eos=True))
        asked = ids(llm, "<|user|>w1.</s><|assistant|>")
        assert [c.token for c in said] == fake_runner.continuation(asked, 3)
        chat = Chat(llm, "b")
        assert "ChatML" in chat.notes[0]
        text = "<|im_start|>system\nb<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        assert chat._prompts._template.render([*chat.messages, {"role": "user", "content": "a"}]) == text
        llm.chat_templates = {"default": "d", "tool_use": "t", "rag": "r"}
        assert [Chat(llm, template=name)._prompts._template.render([]) for name in (None, "rag", "x")] == [
            "d",
            "r",
            "x",
        ]
        assert Chat(llm, variables={"tools": [{}]})._prompts._template.render([]) == "t"
