"""Keys and escape sequences in a console of Windows."""

from __future__ import annotations

import http.client
import sys
import time
from pathlib import Path

import pytest
from systems import WINDOWS

if not WINDOWS:
    pytest.skip("about consoles of Windows", allow_module_level=True)
from windows_console import CTRL_BREAK, CTRL_C, HANG_S, PseudoConsole

COMMAND = sys.executable, "-m", "vkbackend"
GENERATE = *COMMAND, *"generate -dev numpy -n -1 -c 100000 --ignore-eos -p Once".split()
SERVE = *COMMAND, *"serve -dev numpy --port 0".split()
KEYS = pytest.mark.parametrize(
    "key", [pytest.param(CTRL_C, id="Ctrl-C"), pytest.param(CTRL_BREAK, id="Ctrl-Break")]
)


@KEYS
def test_a_key_ends_generate(key: int) -> None:
    with PseudoConsole(*GENERATE) as console:
        console.wait_for("Once.{30}")
        console.press(key)
        assert console.code() == 130
        console.wait_for("interrupted")
        assert "Traceback" not in console.text


@KEYS
def test_a_key_ends_a_server(key: int) -> None:
    with PseudoConsole(*SERVE) as console:
        port = int(console.wait_for(r"listening at http://127\.0\.0\.1:(\d+)")[1])
        deadline = time.monotonic() + HANG_S
        while health(port) != 200:
            assert time.monotonic() < deadline, console.text
            time.sleep(0.1)
        console.press(key)
        assert console.code() == 0 and "Traceback" not in console.text


def health(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/health")
    return connection.getresponse().status


@pytest.fixture
def chat(tmp_path: Path) -> list[str]:
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.content }} {% endfor %}", encoding="utf-8")
    options = "-dev numpy -c 8000 --ignore-eos --chat-template-file".split()
    return [*COMMAND, "chat", *options, str(template)]


def test_ctrl_c_ends_the_answer_and_then_the_chat(chat: list[str]) -> None:
    with PseudoConsole(*chat) as console:
        console.wait_for("> ")
        console.type("Once upon a time\r")
        start = console.wait_for(r"> Once upon a time\s+\S.{20}").end()
        console.press(CTRL_C)
        start = console.wait_for("> ", start).end()
        console.type("Lily\r")
        start = console.wait_for(r"Lily\s+\S.{20}", start).end()
        console.press(CTRL_C)
        console.wait_for("> ", start)
        console.press(CTRL_C)
        console.type("\r")  # Wine ends the input at Enter
        assert console.code() == 130 and "Traceback" not in console.text


@pytest.mark.parametrize("at_prompt", [False, True])
def test_ctrl_break_ends_a_chat(chat: list[str], at_prompt: bool) -> None:
    with PseudoConsole(*chat) as console:
        console.wait_for("> ")
        if not at_prompt:
            console.type("Once upon a time\r")
            console.wait_for(r"> Once upon a time\s+\S.{20}")
        console.press(CTRL_BREAK)
        if at_prompt:
            console.type("\r")
        assert console.code() == 130 and "Traceback" not in console.text


# Prints whether the console interprets the escape sequences of stdout and stderr, before and in a command.
MODES = """
import ctypes, sys
from vkbackend.tools.cli import main
kernel = ctypes.WinDLL("kernel32")
kernel.GetStdHandle.restype = ctypes.c_void_p
outputs = [ctypes.c_void_p(kernel.GetStdHandle(number)) for number in (-11, -12)]
def show(when):
    modes = [ctypes.c_uint32() for _ in outputs]
    ok = [kernel.GetConsoleMode(output, ctypes.byref(mode)) for output, mode in zip(outputs, modes)]
    print(when, ok, [mode.value & 4 for mode in modes], flush=True)
for output in outputs:
    kernel.SetConsoleMode(output, 3)
show("before")
try:
    main(["--version"])
finally:
    show("after")
"""


def test_a_command_enables_escape_sequences() -> None:
    with PseudoConsole(sys.executable, "-c", MODES) as console:
        console.wait_for(r"before \[1, 1\] \[0, 0\]")
        console.wait_for(r"after \[1, 1\] \[4, 4\]")
        assert console.code() == 0
