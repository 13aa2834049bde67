"""Chat templates: the process that compiles and renders them, attacks on it, and what is left of it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from struck import SIGNALLED, everywhere

from vkbackend import LLM
from vkbackend.errors import InvalidArgument, Timeout, VkbackendError
from vkbackend.models.chats.conversation import Chat
from vkbackend.models.text import template_process
from vkbackend.models.text.chat_template import ChatTemplate
from vkbackend.models.text.template_worker import READ_S

pytestmark = pytest.mark.no_vulkan

ECHO = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
GIVE_UP_S = 30.0


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def pid_of(template: ChatTemplate) -> int:
    """The process that renders a template now."""
    template.render([])
    worker = template._process._worker
    assert worker is not None
    return worker._process.pid


def gone(pid: int) -> bool:
    """Whether a process ended, and nothing of it is left to be waited for, before the test gives up."""
    deadline = time.monotonic() + GIVE_UP_S
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may compute for what is left of the first second, instead of five."""
    monkeypatch.setattr(template_process, "CPU_S", 0.4)


# ---- attacks ----

DEEP = "{% set n=namespace(x=[]) %}{% for i in range(3000) %}{% set n.x=[n.x] %}{% endfor %}"
SEGV = (
    "{% set n=namespace(x=range(3)) %}{% for i in range(50000) %}{% set n.x=n.x|batch(1) %}{% endfor %}"
    "{{ n.x|list|length }}"
)
ATTACKS = {
    "crash": (SEGV, "ended the process that ran it|computed for"),
    # Python's own compiler refuses these.
    "break": ("{% break %}", "not valid: 'break' outside loop"),
    "argument twice": ("{{ dict(a=1,a=2) }}", "not valid: keyword argument repeated"),
    "loops in loops": (
        "{% for a in [1] %}" * 21 + "{% endfor %}" * 21,
        "not valid: too many statically nested",
    ),
    "ifs in ifs": ("{% if a %}" * 110 + "{% endif %}" * 110, "not valid: too many levels of indentation"),
    "digits": ("{{ " + "1" * 4301 + " }}", "not valid: .*4300 digits"),
    "parentheses": ("{{ " + "(" * 50_000 + ")" * 50_000 + " }}", "not valid|ended the process"),
    # Time, memory.
    "a long sum": ("{{ " + "+".join("a" * 300) + " }}", "computed for"),
    "an endless loop": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "computed for",
    ),
    "a large power": ("{{ (10 ** 10000000) | string | length }}", "computed for"),
    "a large list": ("{{ [0] * 10 ** 10 }}", "512 MB of memory"),
    "a wide number": ("{{ '%0999999999d' % 1 }}", "512 MB of memory"),
    "a long text": ("{{ 'x' * 5000000 }}", "more than 4194304 characters"),
    # What the sandbox leaves.
    "itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "deep": (DEEP + "{{ n.x | tojson }}", "recursion"),
    "another file": ("{% include '/etc/passwd' %}", "no loader"),
    "a long complaint": ("{{ raise_exception('x' * 10000000) }}", "does not take this conversation: x{900}"),
}


@pytest.mark.usefixtures("quick")
def test_attacks_are_typed_errors_and_leave_the_caller_alone() -> None:
    """While a model generates in another thread."""
    with LLM("models/demo/demo.gguf", devices=["numpy"], n_ctx=64) as llm:
        want = llm.generate("Once upon a time", 12, temperature=0).tokens
        texts, over = list[list[int | None]](), threading.Event()

        def generate() -> None:
            while not over.wait(0.3):
                texts.append(llm.generate("Once upon a time", 12, temperature=0).tokens)

        thread = threading.Thread(target=generate)
        thread.start()
        try:
            for name, (source, pattern) in ATTACKS.items():
                with pytest.raises(InvalidArgument) as error:
                    ChatTemplate(source).render(said("a"))
                assert re.search(pattern, str(error.value)), (name, str(error.value)[:200])
                assert len(str(error.value)) < 1200
        finally:
            over.set()
            thread.join()
        assert texts and all(tokens == want for tokens in texts)


@pytest.mark.usefixtures("quick")
def test_after_an_attack_the_next_conversation_is_rendered() -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    for attack in (endless, "{{ [0] * 10 ** 10 }}"):
        template = ChatTemplate("{% if messages[0].content == 'bad' %}" + attack + "{% endif %}" + ECHO)
        assert template.render(said("a")) == "[a]"
        with pytest.raises(InvalidArgument, match="chat template"):
            template.render(said("bad"))
        assert template.render(said("b", "c")) == "[b][c]"


def cpu_limit_s(pid: int) -> int:
    """Of all the time that a process ever uses; it would end there."""
    found = re.search(r"Max cpu time +(\d+) ", Path(f"/proc/{pid}/limits").read_text())
    assert found
    return int(found[1])


def test_time_is_counted_anew_for_each_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while one is read: what the last one used of its time is nothing to the next."""
    monkeypatch.setattr(template_process, "CPU_S", 0.9)
    template = ChatTemplate("{% for a in range(20000) %}{{ loop.index }}{% endfor %}" + ECHO)
    pid = pid_of(template)
    first = cpu_limit_s(pid)
    assert first >= READ_S
    while cpu_limit_s(pid) == first:
        template.render(said("a"))
    assert cpu_limit_s(pid) == first + 1 and pid_of(template) == pid


def test_a_process_that_ends_with_its_answer_is_not_asked_again() -> None:
    template = ChatTemplate("{% if messages %}{{ [0] * 10 ** 10 }}{% endif %}")
    pid = pid_of(template)
    with pytest.raises(InvalidArgument, match="512 MB"):
        template.render(said("a"))
    assert not Path(f"/proc/{pid}").exists() and template.render([]) == ""


def test_what_is_no_conversation() -> None:
    template = ChatTemplate(ECHO)
    for bad in (b"bytes", {1, 2}, object(), 10**5000):
        with pytest.raises(InvalidArgument, match="conversation of texts"):
            template.render([{"role": "user", "content": bad}])  # type: ignore[dict-item]
    with pytest.raises(InvalidArgument, match="conversation has 33554"):
        template.render(said("x" * (1 << 25)))
    with pytest.raises(InvalidArgument, match="is a bytes"):
        ChatTemplate(b"text")  # type: ignore[arg-type]
    assert template.render(said("a")) == "[a]"


# ---- what goes back and forth ----


def test_conversations_of_every_kind_come_back_whole() -> None:
    """Each after the others: only what differs from the last one travels."""
    template = ChatTemplate(ECHO)
    talks: list[list[str]] = [
        [],
        ["a"],
        ["a", "b", "c"],
        ["a", "b"],
        ["a", "x", "c"],
        ["", "", "é日🦙\ud800\0\n\u2028"],
        ["x" * 300_000, "y" * 300_000],
        ["x" * 300_000, "y" * 299_999 + "z"],
        ["x" * 299_999],
    ]
    for talk in [*talks, *reversed(talks)]:
        assert template.render(said(*talk)) == "".join(f"[{text}]" for text in talk)


def test_an_answer_that_nobody_took_is_not_built_upon() -> None:
    """As after a signal between the answer and its keeping."""
    template = ChatTemplate(ECHO)
    assert template.render(said("a", "b")) == "[a][b]"
    worker = template._process._worker
    assert worker is not None
    before = worker._last
    assert template.render(said("a", "c")) == "[a][c]" and worker._last != before
    worker._last = [], ""
    assert template.render(said("a", "c", "d")) == "[a][c][d]"


def test_values_that_are_no_texts_may_change_meanwhile() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m | tojson }}{% endfor %}")
    parts = ["a"]
    messages: list[Any] = [{"content": parts}]
    assert template.render(messages) == '{"content": ["a"]}'
    parts.append("b")
    assert template.render(messages) == '{"content": ["a", "b"]}'
    assert template.render([{"role": "u", "content": "a"}]) == '{"role": "u", "content": "a"}'
    assert template.render([{"content": "a", "role": "u"}]) == '{"content": "a", "role": "u"}'


def test_threads_take_turns() -> None:
    template = ChatTemplate(ECHO)
    failed: list[str] = []

    def render(name: str) -> None:
        for i in range(30):
            if template.render(said(name, str(i))) != f"[{name}][{i}]":
                failed.append(name)

    threads = [threading.Thread(target=render, args=(f"thread {i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_busy_template_is_waited_for_with_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(ECHO)
    monkeypatch.setattr(template_process, "WALL_S", 0.05)
    taken, over = threading.Event(), threading.Event()

    def keep() -> None:
        with template._process._lock:
            taken.set()
            over.wait()

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        assert taken.wait(10)
        with pytest.raises(Timeout, match="busy"):
            template.render(said("a"))
    finally:
        over.set()
        thread.join()


def test_interrupts_leave_a_template_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they can strike who takes and gives back the process: the next text is right, and soon."""

    class Worker:
        def idle(self) -> bool:
            return True

        def ask(self, template: dict[str, Any], kept: int) -> None:
            pass

        def render(self, messages: list[Any], variables: dict[str, Any]) -> str:
            return f"[{dict(messages[0])['content']}]"

    monkeypatch.setattr(template_process, "_Worker", Worker)
    template = template_process.TemplateProcess(ECHO, "", "", 100)

    def from_another_thread() -> None:
        texts: list[str] = []
        thread = threading.Thread(target=lambda: texts.append(template.render(said("b"))))
        thread.start()
        thread.join()
        assert texts == ["[b]"]

    monkeypatch.setattr(template_process, "WALL_S", 0.5)  # a lock that is not given back is told
    ask = template_process.TemplateProcess._ask.__code__
    everywhere(
        lambda: template.render(said("a")),
        from_another_thread,
        lambda code: code is ask,
        behind=SIGNALLED,
        least=5,
    )


# ---- the process ----


def test_equal_templates_share_a_process_and_it_ends_with_them() -> None:
    first, second, other = ChatTemplate(ECHO), ChatTemplate(ECHO), ChatTemplate(ECHO, "<s>")
    pid = pid_of(first)
    assert pid == pid_of(second) != pid_of(other)
    del first
    assert second.render(said("a")) == "[a]" and pid_of(second) == pid
    del second
    assert gone(pid)


def test_it_has_nothing_of_ours_and_limits() -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    template = ChatTemplate("{# started behind the pipe #}" + ECHO)
    pid = pid_of(template)
    try:
        assert set(os.listdir(f"/proc/{pid}/fd")) == {"0", "1", "2"}
    finally:
        os.close(read)
        os.close(write)
    assert os.getsid(pid) == pid
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert re.search(r"Max address space +536870912 ", limits)
    assert re.search(r"Max core file size +0 ", limits)
    loaded = Path(f"/proc/{pid}/maps").read_text()
    assert "numpy" not in loaded and "vulkan" not in loaded and "tokenizers" not in loaded
    os.kill(pid, signal.SIGINT)
    assert template.render(said("a")) == "[a]" and pid_of(template) == pid


def test_one_that_died_is_replaced() -> None:
    template = ChatTemplate(ECHO)
    pid = pid_of(template)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert template.render(said("a", "b")) == "[a][b]" and pid_of(template) != pid and gone(pid)


def test_one_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(ECHO)
    pid = pid_of(template)
    os.kill(pid, signal.SIGSTOP)
    with monkeypatch.context() as patch, pytest.raises(InvalidArgument, match="took more than 0 s"):
        patch.setattr(template_process, "WALL_S", 0.2)
        template.render(said("x" * 1_000_000))  # more than the socket holds: it stops while it is sent
    assert gone(pid) and template.render(said("a")) == "[a]"


def test_a_signal_while_waiting_leaves_no_answer_to_another_conversation() -> None:
    class Pressed(Exception):
        pass

    def press(*_: object) -> None:
        raise Pressed

    template = ChatTemplate("{% for a in range(99999) %}{{ a }}{% endfor %}" + ECHO)
    pid = pid_of(template)
    os.kill(pid, signal.SIGSTOP)  # so that it is waited for
    before = signal.signal(signal.SIGALRM, press)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Pressed):
            template.render(said("first"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert gone(pid) and template.render(said("second")).endswith("[second]")


def test_no_process_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    for executable, pattern in ((None, "can be started"), ("/bin/false", r"did not start \(exit code 1\)")):
        with monkeypatch.context() as patch, pytest.raises(VkbackendError, match=pattern) as error:
            patch.setattr(sys, "executable", executable)
            ChatTemplate("{{ 'never seen' }}")
        assert type(error.value) is VkbackendError
    with monkeypatch.context() as patch, pytest.raises(Timeout, match="did not start in 0 s"):
        patch.setattr(template_process, "START_S", 0.0)
        ChatTemplate("{{ 'never seen' }}")


def answers(frame: bytes) -> Callable[..., Any]:
    """A socketpair whose other side, which the process gets, is mute; the answer is already there."""

    def made() -> tuple[socket.socket, socket.socket]:
        ours, theirs = real()
        theirs.sendall(frame)
        return ours, theirs

    real = socket.socketpair
    return made


def test_an_answer_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that a template took over can say what it likes."""
    head = template_process.HEAD.pack
    ready, text = head(0, 0, template_process.READY), template_process.TEXT
    for frame in (head(0, 0, 77), head(1 << 31, 0, text), head(2, 0, text) + b"\xff\xff"):
        with monkeypatch.context() as patch, pytest.raises(InvalidArgument, match="ended the process"):
            patch.setattr(template_process, "END_S", 0.1)
            patch.setattr(socket, "socketpair", answers(ready + frame))
            ChatTemplate("{{ 'never seen' }}")


# ---- programs ----


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """A program of its own, without a guard around its main part."""

    def run_(source: str, *flags: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "program.py"
        begin = "from vkbackend.models.text.chat_template import ChatTemplate\n"
        path.write_text(begin + textwrap.dedent(source))
        command = [sys.executable, *flags, str(path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)

    yield run_


HELLO = "[{'role': 'user', 'content': 'hello'}]"


def test_a_program_needs_no_guard_and_ends_without_noise(run: Any) -> None:
    done = run(
        f"""
        template = ChatTemplate({ECHO!r})
        print(template.render({HELLO}), template._process._worker._process.pid)
        """,
        "-Xdev",
        "-Werror",
    )
    assert (done.returncode, done.stderr) == (0, "")
    text, pid = done.stdout.split()
    assert text == "[hello]" and gone(int(pid))


def test_it_ends_with_a_program_that_is_killed(run: Any) -> None:
    done = run(
        f"""
        import os, signal
        template = ChatTemplate({ECHO!r})
        print(template._process._worker._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert done.returncode == -signal.SIGKILL and gone(int(done.stdout))


def test_modules_beside_a_program_are_not_taken_for_the_templates_own(run: Any, tmp_path: Path) -> None:
    for name in ("jinja2.py", "resource.py", "markupsafe.py"):  # which only the process imports
        (tmp_path / name).write_text("raise SystemExit('the wrong module')")
    done = run(f"print(ChatTemplate({ECHO!r}).render({HELLO}))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[hello]\n", "")


def test_a_fork_has_a_process_of_its_own(run: Any) -> None:
    done = run(
        f"""
        import os, sys, threading
        template = ChatTemplate({ECHO!r})
        def pid(): return template._process._worker._process.pid
        mine = pid()
        with template._process._lock:  # as if another thread rendered
            if (child := os.fork()) == 0:
                same = template.render({HELLO}) == "[hello]" and pid() != mine
                sys.exit(0 if same else 3)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, template.render({HELLO}), pid() == mine)
        """
    )
    assert (done.stdout, done.stderr) == ("0 [hello] True\n", "")


def test_nothing_is_left_to_be_waited_for(run: Any) -> None:
    done = run(
        f"""
        import os
        from vkbackend.errors import InvalidArgument
        template = ChatTemplate("{{% if messages %}}{{{{ [0] * 10 ** 10 }}}}{{% endif %}}")
        for _ in range(3):
            try:
                template.render({HELLO})
            except InvalidArgument:
                print("refused")
        del template
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            print("no children")
        """
    )
    assert (done.stdout.split("\n"), done.stderr) == ([*["refused"] * 3, "no children", ""], "")


def test_a_chat_whose_template_crashes_goes_on(tmp_path: Path) -> None:
    source = (
        "{% if messages | length == 3 %}"
        + SEGV
        + "{% endif %}{% for m in messages %}{{ m.content }} {% endfor %}"
    )
    with LLM("models/demo/demo.gguf", devices=["numpy"], n_ctx=64) as llm:
        chat = Chat(llm, template=source)
        first = [chunk.token for chunk in chat.send("Once upon a time", 3, temperature=0)]
        with pytest.raises(InvalidArgument, match="chat template"):
            chat.send("more")
        assert len(chat.messages) == 2
        chat.clear()
        assert [chunk.token for chunk in chat.send("Once upon a time", 3, temperature=0)] == first
