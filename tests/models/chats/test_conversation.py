"""Conversations: the template, the tokens a turn computes, and the command on pipes and on a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import fake_runner
import pytest
from gguf_files import F32, STRING, U32, array, key, vocabulary
from places import ROOT

from vkbackend import LLM
from vkbackend.errors import InvalidArgument
from vkbackend.models.chats.conversation import Chat
from vkbackend.models.chats.conversation import said as as_message
from vkbackend.models.engine.completion import total
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.models.text.chat_template import ChatTemplate
from vkbackend.tools.chat import FRESH, Conversation, interrupts, shown
from vkbackend.tools.console import console
from vkbackend.tools.message_lines import messages

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}<|assistant|>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
WORDS = [f"\u2581w{i}." for i in range(32)]
TOKENS = ["<unk>", "<s>", "</s>", *ROLES, "<0x41>", "<0x42>", *WORDS]
TYPES = [2, 3, 3, 3, 3, 3, 6, 6, *[1] * 32]


# ---- the template ----


def test_a_template_sees_what_hugging_face_gives_it() -> None:
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


def test_json_takes_the_arguments_of_hugging_face() -> None:
    value = "{{ {'b': 'é', 'a': [1]} | tojson(%s) }}"
    cases = {
        "": '{"b": "é", "a": [1]}',
        "true": '{"b": "\\u00e9", "a": [1]}',  # the first one is ensure_ascii
        "ensure_ascii=true, sort_keys=true": '{"a": [1], "b": "\\u00e9"}',
        "separators=(',', ':')": '{"b":"é","a":[1]}',
        "false, 1": '{\n "b": "é",\n "a": [\n  1\n ]\n}',
    }
    for arguments, text in cases.items():
        assert ChatTemplate(value % arguments).render([]) == text


def test_templates_that_loop_over_tools_without_asking() -> None:
    """None is what Hugging Face gives; Hermes 2 and 3 and Command R+ take no None."""
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
def test_a_template_that_does_wrong_is_a_typed_error(source: str, pattern: str) -> None:
    with pytest.raises(InvalidArgument, match=pattern):
        ChatTemplate(source).render([{"role": "user", "content": "a"}])


# ---- a conversation, on a runner without a model ----


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Words and the markers of TURNS, for a runner whose tokens depend on all that came before."""
    monkeypatch.setitem(sys.modules, "vkbackend.models.engine.runner", fake_runner.MODULE)
    scores = array("tokenizer.ggml.scores", F32, [0.0] * len(TOKENS))
    extra = [scores, key("tokenizer.chat_template", STRING, TURNS)]
    path = tmp_path / "words.gguf"
    path.write_bytes(vocabulary("llama", TOKENS, types=TYPES, extra=extra))
    return path


def ids(llm: LLM, text: str) -> list[int]:
    return [1, *llm.tokenize(text, add_special=False, parse_special=True)]


def test_a_turn_computes_only_what_is_new(model: Path) -> None:
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
        # The last token of an answer was made and has not run.
        assert second[-1].timings is not None and second[-1].timings["prompt_n"] == len(asked) - len(held) + 1
        assert [m["role"] for m in chat.messages] == ["system", *2 * ["user", "assistant"]]
        chat.clear()
        again = list(chat.send("w2. w3.", 6, temperature=0, ignore_eos=True))
        assert [c.token for c in again] == [c.token for c in first]


def test_a_beginning_token_need_not_be_text(model: Path) -> None:
    """A template may write out the texts of the special tokens, and a byte may be one."""
    raw = model.read_bytes().replace(b"<0x41>", b"<0xFF>")
    extra = key("tokenizer.ggml.bos_token_id", U32, TOKENS.index("<0x41>"))
    n_keys = struct.unpack_from("<Q", raw, 16)[0] + 1
    model.write_bytes(raw[:16] + struct.pack("<Q", n_keys) + extra + raw[24:])
    with LLM(model, n_ctx=64) as llm:
        chat = Chat(llm, template="{{ bos_token }}{{ messages[0].content }}")
        assert chat._prompts._template.render([{"role": "user", "content": "a"}]) == "\ufffda"


def test_an_answer_that_is_ended_stays_and_a_stop_string_does_not_mix_up_tokens(model: Path) -> None:
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
    """Unless the caller says that they count."""
    with LLM(model, n_ctx=200) as llm:
        asked = list[list[int]]()
        stream = llm.stream
        llm.stream = lambda ids, *rest, **how: asked.append(ids) or stream(ids, *rest, **how)  # type: ignore
        for parse_special, n in ((False, 1), (True, 2)):
            chat = Chat(llm, parse_special=parse_special)
            for turn in (1, 2):  # the second goes on from what the slot holds
                list(chat.send("A<|user|>B", 4, temperature=0, ignore_eos=True))
                assert asked[-1].count(TOKENS.index("<|user|>")) == n * turn and chat.protected
        upper = Chat(llm, template="{{ messages[0].content | upper }}{{ messages | length }}")
        list(upper.send("a</s>", 1))
        assert not upper.protected


# ---- the command ----


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def hold(model: Path, stdin: io.StringIO, first: str | None = None, *, single: bool = False,
         most: int | None = 4, n_ctx: int = 120) -> Conversation:  # fmt: skip
    """The loop on a stdin; tokens are the likeliest ones."""
    with LLM(model, n_ctx=n_ctx) as llm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", stdin)
        sampling = SamplingParams(0, 40, 0.95, 0.05, 1.0, 64, 1)
        found = Conversation(Chat(llm), sampling, most, {"ignore_eos": True}, console(stderr=True))
        found.hold(first, single)
        return found


def test_lines_are_messages_until_they_end(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = hold(model, io.StringIO("w2.\n\n  /clear \nw1.\n/exit\nw3.\n"), "w1.")
    out, err = capsys.readouterr()
    lines = out.split("\n")
    assert len(lines) == 4 and lines[0] == lines[2] != lines[1] and lines[3] == ""
    assert err == "the conversation is forgotten\n"
    assert [m["content"] for m in found.chat.messages] == ["w1.", lines[0]]
    assert len(found.timings) == 3 and total(found.timings)["decode_n"] == 9
    assert len(hold(model, io.StringIO("w1.\nw2.\n"), single=True).timings) == 1
    assert len(hold(model, io.StringIO("w1.\nw2.\n"), "w3.", single=True).timings) == 1
    assert len(hold(model, io.StringIO("w1.\nw2.")).timings) == 2
    assert "w1." not in capsys.readouterr().err


def test_a_full_context_is_told_in_one_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "w1. " * 30
    hold(model, Terminal(f"w1.\n{long}\n/clear\nw1.\n"), most=None, n_ctx=20)
    out, err = capsys.readouterr()
    ended, refused, cleared, again, end = err.removeprefix("> ").split("\n> ")
    assert ended == again == f"ended  because the context is full: {FRESH}"
    assert re.fullmatch(r"the prompt has \d+ tokens and the context holds 20; .*/clear.*", refused)
    assert cleared == "the conversation is forgotten" and not end
    first, second, rest = out.split("\n")
    assert first == second and not rest
    with pytest.raises(InvalidArgument, match="the context holds 20"):
        hold(model, io.StringIO(f"w1.\n{long}\n"), most=None, n_ctx=20)  # a script is not there to clear it


def test_the_oldest_messages_leave_a_full_context(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The system prompt stays; also where the input is a pipe, and in the middle of an answer."""
    with LLM(model, n_ctx=60) as llm:
        chat, asked = Chat(llm, "w9."), list[list[int]]()
        stream = llm.stream
        llm.stream = lambda ids, *rest, **how: asked.append(ids) or stream(ids, *rest, **how)  # type: ignore
        for n in range(6):
            said = list(chat.send(f"w{n}.", 12, temperature=0, ignore_eos=True))
            assert len(said) == 12 and said[-1].finish_reason == "length"
        assert chat.n_left_out >= 4 and len(chat.messages) == 13
        seen = [chat.messages[0], *chat.messages[1 + chat.n_left_out : -1]]
        assert seen[1]["role"] == "user"
        found = llm.detokenize(asked[-1], skip_special=False)  # the words of users are no tokens
        roles = [f"<|{message['role']}|>" for message in [*seen, {"role": "assistant"}]]
        assert re.findall(r"<\|\w+\|>", found) == roles and len(asked[-1]) <= 45
        assert [c.token for c in said] == fake_runner.continuation(asked[-1], 12, [2])
        chat.clear()
        list(chat.send("w1.", 20, temperature=0, ignore_eos=True))
        long = list(chat.send("w2.", 35, temperature=0, ignore_eos=True))  # 30 + 35 tokens do not fit in 60
        assert len(long) == 35 and chat.n_left_out == 2
        assert [c.finish_reason for c in long] == [None] * 34 + ["length"]
        assert long[-1].timings is not None and long[-1].timings["decode_n"] >= 33
    hold(model, io.StringIO("w1.\n" * 12), n_ctx=40)
    assert "oldest messages have left it" in capsys.readouterr().err


def test_commands(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "talk.json"
    lines = f"/regen\nw1.\n/regen\n/save {path}\n/save\n/help\n/hlep\n/a/b\n/save /nowhere/x\n"
    found = hold(model, Terminal(lines))
    out, err = capsys.readouterr()
    answers = out.split("\n")
    assert answers[0] == answers[1] != answers[2] and len(answers) == 4
    assert json.loads(path.read_text()) == found.chat.messages[:2]
    for said in ("no message to answer once more", "2 messages are in", "/save needs", "/hlep is no command",
                 "/regen  answer", "'/nowhere/x' cannot be written"):  # fmt: skip
        assert said in err
    assert [m["content"] for m in found.chat.messages][::2] == ["w1.", "/a/b"]


def test_messages_of_several_lines() -> None:
    text = 'one\ntwo \\\n three\\\nfour\n"""five\n\n six"""\n"""seven"""\n"""\neight\n"""\n"""nine'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(text))
        want = ["zero", "one", "two \n three\nfour", "five\n\n six", "seven", "eight", "nine"]
        assert list(messages(" zero")) == want


def test_thoughts_are_dimmed_on_a_terminal_and_kept_apart(capsys: pytest.CaptureFixture[str]) -> None:
    text = "<think>Hm</think>Yes"
    for terminal in (Terminal(), io.StringIO()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", terminal)
            show = shown(False)
            for i, c in enumerate(text):
                show(c, i == len(text) - 1)
        said = terminal.getvalue()
        if terminal.isatty():
            assert said.replace("\x1b[22m\x1b[2m", "") == "\x1b[2mHm\x1b[22mYes"
        else:
            assert said == text
    kept = {"role": "assistant", "content": "Yes", "reasoning_content": "Hm", "thinking": "Hm"}
    assert as_message(text, False) == kept
    assert as_message("Hm</think>Yes", True) == kept and as_message(" a", False)["content"] == " a"


def test_the_first_interrupt_ends_an_answer(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []

    def write(text: str) -> None:
        texts.append(text)
        if len(texts) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("vkbackend.tools.chat.write_text", write)
    found = hold(model, io.StringIO("w1.\nw2.\n"), most=8)
    assert len(texts) == 3 + 1 + 8 + 1 and texts[3] == texts[-1] == "\n"
    assert found.chat.messages[1]["content"] == "".join(texts[:3]) and len(found.timings) == 1
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


COMMAND = [sys.executable, "-m", "vkbackend.tools.cli", "chat", "-dev", "numpy"]


def chat(*args: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], input=text, capture_output=True, text=True, timeout=60, cwd=ROOT)


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "plain.jinja"
    path.write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    return str(path)


def test_a_pipe_is_answered_line_by_line(template: str) -> None:
    args = ("--chat-template-file", template, "-n", "8", "-c", "256", "--temp", "0")
    result = chat(*args, "-sys", "- A story:", text="Once upon a time\n/clear\nOnce upon a time\n")
    assert result.returncode == 0, result.stderr
    first, second, end = result.stdout.split("\n")
    assert first == second and len(first) > 10 and not end
    assert re.search(r"decode +14 tokens", result.stderr) and "memory in MiB" in result.stderr


def test_help() -> None:
    shown = chat("--help").stdout
    assert shown.startswith("usage: vkbackend chat")
    entries = " ".join(shown.partition("\noptions:")[2].split())
    for option in (
        "-sys TEXT, --system-prompt",
        "-p TEXT",
        "-st, --single-turn",
        "--chat-template-file",
        "-c N",
    ):
        assert option in entries
    assert "(default: 4096)" in entries and "/clear" in shown and "Ctrl-C" in shown


def test_errors_of_the_command(tmp_path: Path, template: str) -> None:
    bare = tmp_path / "bare.gguf"
    raw = (ROOT / "models" / "demo" / "demo.gguf").read_bytes()
    bare.write_bytes(raw.replace(b"tokenizer.chat_template", b"tokenizer.chat_templote"))
    without = chat("-m", str(bare), "-n", "1", text="a\n")
    assert (
        without.returncode == 0
        and "the model has no chat template: messages are written as ChatML" in without.stderr
    )
    assert chat("--chat-template-file", "/nowhere").returncode == 2
    full = chat("--chat-template-file", template, "-c", "8", "-p", "Once upon a time " * 9, "-st")
    assert full.returncode == 2 and "the context holds 8" in full.stderr and "Traceback" not in full.stderr


def test_a_model_without_a_template(model: Path) -> None:
    """It takes one, by its text or the name of another one of the file; else messages are ChatML."""
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


def test_ctrl_c_on_a_terminal_ends_the_answer_and_then_the_program(template: str) -> None:
    terminal, slave = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "--chat-template-file", template, "-c", "8000", "--ignore-eos"],
        stdin=slave, stdout=slave, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )  # fmt: skip
    os.close(slave)

    def read_until(pattern: str) -> None:
        seen, deadline = "", time.monotonic() + 40
        while not re.search(pattern, seen, re.DOTALL):
            assert time.monotonic() < deadline and process.poll() is None, seen
            if select.select([terminal], [], [], 0.1)[0]:
                seen += os.read(terminal, 4096).decode(errors="replace")

    try:
        read_until("> ")
        os.write(terminal, b"Once upon a time\n")
        read_until("a time\r\n.{20}")
        process.send_signal(signal.SIGINT)
        read_until("\n> ")
        time.sleep(0.3)  # readline heeds a signal that comes while it waits, not one just before
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        os.close(terminal)
    assert process.returncode == 130 and "Traceback" not in err and err.rstrip().endswith("interrupted")
