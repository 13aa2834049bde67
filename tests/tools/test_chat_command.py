from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_runner
import pytest
from chat_words import words_model
from places import ROOT

from vkbackend import LLM
from vkbackend.errors import InvalidArgument
from vkbackend.models.conversation import Chat, answer_message
from vkbackend.models.engine.completion import total
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.tools.chat import FRESH, Conversation, interrupts, shown
from vkbackend.tools.cli import main
from vkbackend.tools.console import console
from vkbackend.tools.message_lines import messages

model = words_model  # pytest finds the fixture by this name


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def hold(model: Path, stdin: io.StringIO, first: str | None = None, *, single: bool = False,
         most: int | None = 4, n_ctx: int = 120) -> Conversation:  # fmt: skip
    with LLM(model, n_ctx=n_ctx) as llm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", stdin)
        sampling = SamplingParams(0, 40, 0.95, 0.05, 1.0, 64, 1)
        conversation = Conversation(Chat(llm), sampling, most, {"ignore_eos": True}, console(stderr=True))
        conversation.hold(first, single)
        return conversation


def test_each_input_line_is_a_message(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = hold(model, io.StringIO("w2.\n\n  /clear \nw1.\n/exit\nw3.\n"), "w1.")
    out, err = capsys.readouterr()
    lines = out.split("\n")
    assert len(lines) == 4 and lines[0] == lines[2] != lines[1] and lines[3] == ""
    assert err == "the conversation is forgotten\n"
    assert [m["content"] for m in conversation.chat.messages] == ["w1.", lines[0]]
    assert len(conversation.timings) == 3 and total(conversation.timings)["decode_n"] == 9
    assert len(hold(model, io.StringIO("w1.\nw2.\n"), single=True).timings) == 1
    assert len(hold(model, io.StringIO("w1.\nw2.\n"), "w3.", single=True).timings) == 1
    assert len(hold(model, io.StringIO("w1.\nw2.")).timings) == 2
    assert "w1." not in capsys.readouterr().err


def test_a_full_context_is_reported_in_one_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        hold(model, io.StringIO(f"w1.\n{long}\n"), most=None, n_ctx=20)


def test_the_oldest_messages_leave_a_full_context(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        text = llm.detokenize(asked[-1], skip_special=False)
        roles = [f"<|{message['role']}|>" for message in [*seen, {"role": "assistant"}]]
        assert re.findall(r"<\|\w+\|>", text) == roles and len(asked[-1]) <= 45
        assert [c.token for c in said] == fake_runner.continuation(asked[-1], 12, [2])
        chat.clear()
        list(chat.send("w1.", 20, temperature=0, ignore_eos=True))
        # 30 + 35 tokens exceed the context of 60
        long = list(chat.send("w2.", 35, temperature=0, ignore_eos=True))
        assert len(long) == 35 and chat.n_left_out == 2
        assert [c.finish_reason for c in long] == [None] * 34 + ["length"]
        assert long[-1].timings is not None and long[-1].timings["decode_n"] >= 33
    hold(model, io.StringIO("w1.\n" * 12), n_ctx=40)
    assert "oldest messages have left it" in capsys.readouterr().err


def test_commands(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "talk.json"
    lines = f"/regen\nw1.\n/regen\n/save {path}\n/save\n/help\n/hlep\n/a/b\n/save /nowhere/x\n"
    conversation = hold(model, Terminal(lines))
    out, err = capsys.readouterr()
    answers = out.split("\n")
    assert answers[0] == answers[1] != answers[2] and len(answers) == 4
    assert json.loads(path.read_text(encoding="utf-8")) == conversation.chat.messages[:2]
    for said in ("no message to answer again", "2 messages are in", "/save needs", "/hlep is not a command",
                 "/regen  answer", "'/nowhere/x' cannot be written"):  # fmt: skip
        assert said in err
    assert [m["content"] for m in conversation.chat.messages][::2] == ["w1.", "/a/b"]


def test_messages_of_several_lines() -> None:
    text = 'one\ntwo \\\n three\\\nfour\n"""five\n\n six"""\n"""seven"""\n"""\neight\n"""\n"""nine'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(text))
        want = ["zero", "one", "two \n three\nfour", "five\n\n six", "seven", "eight", "nine"]
        assert list(messages(" zero")) == want


def test_thoughts_are_dimmed_on_a_terminal_and_separated(capsys: pytest.CaptureFixture[str]) -> None:
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
    assert answer_message(text, False) == kept
    assert answer_message("Hm</think>Yes", True) == kept and answer_message(" a", False)["content"] == " a"


def test_the_first_interrupt_ends_an_answer(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []

    def write(text: str) -> None:
        texts.append(text)
        if len(texts) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("vkbackend.tools.chat.write_text", write)
    conversation = hold(model, io.StringIO("w1.\nw2.\n"), most=8)
    assert len(texts) == 3 + 1 + 8 + 1 and texts[3] == texts[-1] == "\n"
    assert conversation.chat.messages[1]["content"] == "".join(texts[:3]) and len(conversation.timings) == 1
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


COMMAND = [sys.executable, "-m", "vkbackend.tools.cli", "chat", "-dev", "numpy"]


def chat(*args: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args], input=text, capture_output=True, text=True, encoding="utf-8", timeout=60, cwd=ROOT
    )


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "plain.jinja"
    path.write_text("{% for m in messages %}{{ m.content }} {% endfor %}", encoding="utf-8")
    return str(path)


def test_each_line_of_a_pipe_is_answered(template: str) -> None:
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
    assert "(default: the model's own, at most 4096)" in entries and "/clear" in shown and "Ctrl-C" in shown


def test_errors_of_the_command(
    tmp_path: Path, template: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def called(*args: str, text: str = "") -> tuple[int, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return main(["chat", "-dev", "numpy", *args]), capsys.readouterr().err

    bare = tmp_path / "bare.gguf"
    raw = (ROOT / "models" / "demo" / "demo.gguf").read_bytes()
    bare.write_bytes(raw.replace(b"tokenizer.chat_template", b"tokenizer.chat_templote"))
    code, err = called("-m", str(bare), "-n", "1", text="a\n")
    assert code == 0 and "the model has no chat template: messages are written as ChatML" in err
    assert called("--chat-template-file", "/nowhere")[0] == 2
    code, err = called("--chat-template-file", template, "-c", "8", "-p", "Once upon a time " * 9, "-st")
    assert code == 2 and "the context holds 8" in err and "Traceback" not in err


def test_ctrl_c_on_a_terminal_ends_the_answer_and_then_the_program(template: str) -> None:
    terminal, slave = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "--chat-template-file", template, "-c", "8000", "--ignore-eos"],
        stdin=slave, stdout=slave, stderr=subprocess.PIPE, encoding="utf-8", cwd=ROOT, start_new_session=True,
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
        time.sleep(0.3)  # readline handles signals only while it waits
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        os.close(terminal)
    assert process.returncode == 130 and "Traceback" not in err and err.rstrip().endswith("interrupted")
