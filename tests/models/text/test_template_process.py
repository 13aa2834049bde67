"""A separate process renders chat templates. The tests cover this process's environment, its end, and
programs that use it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import KILL, KILLED, kill, process_ends, suspend
from templates import ECHO, pid_of, user_messages

from vkbackend.errors import InvalidArgument, Timeout, VkbackendError
from vkbackend.models.processes import child, frames
from vkbackend.models.text import template_process
from vkbackend.models.text.chat_template import ChatTemplate
from vkbackend.system import confinement

pytestmark = pytest.mark.no_vulkan


# ---- the process ----


def test_equal_templates_share_a_process_and_it_ends_with_them() -> None:
    first, second, other = ChatTemplate(ECHO), ChatTemplate(ECHO), ChatTemplate(ECHO, "<s>")
    pid = pid_of(first)
    assert pid == pid_of(second) != pid_of(other)
    del first
    assert second.render(user_messages("a")) == "[a]" and pid_of(second) == pid
    del second
    assert process_ends(pid)


def test_the_worker_inherits_nothing_and_has_limits() -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    template = ChatTemplate("{# started after the pipe #}" + ECHO)
    pid = pid_of(template)
    try:
        assert set(os.listdir(f"/proc/{pid}/fd")) == {"0", "1", "2"}
    finally:
        os.close(read)
        os.close(write)
    assert os.getsid(pid) == pid
    limits = Path(f"/proc/{pid}/limits").read_text(encoding="utf-8")
    assert re.search(r"Max address space +536870912 ", limits)
    assert re.search(r"Max core file size +0 ", limits)
    loaded = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    assert "numpy" not in loaded and "vulkan" not in loaded and "tokenizers" not in loaded
    os.kill(pid, signal.SIGINT)
    assert template.render(user_messages("a")) == "[a]" and pid_of(template) == pid


def test_a_worker_that_ended_is_replaced() -> None:
    template = ChatTemplate(ECHO)
    pid = pid_of(template)
    kill(pid)
    assert (
        template.render(user_messages("a", "b")) == "[a][b]" and pid_of(template) != pid and process_ends(pid)
    )


def test_a_silent_worker_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(ECHO)
    pid = pid_of(template)
    suspend(pid)
    with monkeypatch.context() as patch, pytest.raises(InvalidArgument, match="took more than 0 s"):
        patch.setattr(template_process, "WALL_S", 0.2)
        template.render(user_messages("x" * 1_000_000))
    assert process_ends(pid) and template.render(user_messages("a")) == "[a]"


def test_a_signal_while_waiting_leaves_no_answer_to_another_conversation() -> None:
    class Pressed(Exception):
        pass

    def press(*_: object) -> None:
        raise Pressed

    template = ChatTemplate("{% for a in range(99999) %}{{ a }}{% endfor %}" + ECHO)
    pid = pid_of(template)
    suspend(pid)
    before = signal.signal(signal.SIGALRM, press)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Pressed):
            template.render(user_messages("first"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert process_ends(pid) and template.render(user_messages("second")).endswith("[second]")


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for executable, pattern in ((None, "can be started"), ("/bin/false", r"did not start \(exit code 1\)")):
        with monkeypatch.context() as patch, pytest.raises(VkbackendError, match=pattern) as error:
            patch.setattr(sys, "executable", executable)
            ChatTemplate("{{ 'never seen' }}")
        assert type(error.value) is VkbackendError
    with monkeypatch.context() as patch, pytest.raises(Timeout, match="did not start in 0 s"):
        patch.setattr(child, "START_S", 0.0)
        ChatTemplate("{{ 'never seen' }}")


def test_an_answer_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    head = frames.HEAD.pack
    ready, text = head(0, 0, frames.READY), frames.ANSWERED
    for frame in (head(0, 0, 77), head(1 << 31, 0, text), head(2, 0, text) + b"\xff\xff"):
        program = f"import os, time; os.write(1, {ready + frame!r}); time.sleep(60)"
        with monkeypatch.context() as patch, pytest.raises(InvalidArgument, match="ended the process"):
            patch.setattr(child, "END_S", 0.1)
            patch.setattr(child, "START", program + "  # {}")
            ChatTemplate("{{ 'never seen' }}")


# ---- limits that the parent enforces ----


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker sets no limits for itself, as on a system that cannot enforce them."""
    no_limits = "import vkbackend.system.own_limits as own; own.restrict = own.limit_cpu = lambda n: None; "
    monkeypatch.setattr(child, "START", child.START.replace("from {}", no_limits + "from {}"))


@pytest.mark.usefixtures("unlimited")
def test_the_parent_ends_a_worker_that_computes_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "CPU_S", 0.1)
    monkeypatch.setattr(confinement, "SLACK_S", 0.1)
    power = "{{ (10 ** (10000000 * messages | length)) | string | length }}{# watched #}"
    template = ChatTemplate("{% if messages %}" + power + "{% endif %}")
    pid = pid_of(template)
    assert "Max cpu time              unlimited" in Path(f"/proc/{pid}/limits").read_text(encoding="utf-8")
    with pytest.raises(InvalidArgument, match=r"computed for 0\.1 s"):
        template.render(user_messages("a"))
    assert process_ends(pid) and template.render([]) == ""


@pytest.mark.usefixtures("unlimited")
def test_the_parent_ends_a_worker_that_takes_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "TEMPLATE_MEMORY", 64 << 20)
    # The list takes 160 MB, and the loops then run for longer than the test.
    source = "{% set n = [0] * (20000000 * messages | length) %}" + "{% for a in n %}" * 2
    template = ChatTemplate(source + "{% endfor %}" * 2)
    pid = pid_of(template)
    with pytest.raises(InvalidArgument, match="more than 64 MB of memory"):
        template.render(user_messages("a"))
    assert process_ends(pid) and template.render([]) == ""


# ---- programs ----


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Return a function that runs a program without `if __name__ == "__main__"`."""

    def run_(source: str, *flags: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "program.py"
        begin = "from vkbackend.models.text.chat_template import ChatTemplate\n"
        path.write_text(begin + textwrap.dedent(source), encoding="utf-8")
        command = [sys.executable, *flags, str(path)]
        return subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", timeout=60, cwd=tmp_path
        )

    yield run_


HELLO = "[{'role': 'user', 'content': 'hello'}]"


def test_a_program_needs_no_main_guard_and_ends_without_output(run: Any, tmp_path: Path) -> None:
    """The worker does not import modules next to the program."""
    for name in ("jinja2.py", "resource.py", "markupsafe.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')", encoding="utf-8")
    done = run(
        f"""
        template = ChatTemplate({ECHO!r})
        print(template.render({HELLO}), template._process.shared._worker._process.pid)
        """,
        "-Xdev",
        "-Werror",
    )
    assert (done.returncode, done.stderr) == (0, "")
    text, pid = done.stdout.split()
    assert text == "[hello]" and process_ends(int(pid))


def test_the_worker_ends_when_its_program_is_killed(run: Any) -> None:
    done = run(
        f"""
        import os
        template = ChatTemplate({ECHO!r})
        print(template._process.shared._worker._process.pid, flush=True)
        os.kill(os.getpid(), {KILL})
        """
    )
    assert done.returncode == KILLED and process_ends(int(done.stdout))


def test_a_forked_child_starts_its_own_worker(run: Any) -> None:
    done = run(
        f"""
        import os, sys, threading
        template = ChatTemplate({ECHO!r})
        def pid(): return template._process.shared._worker._process.pid
        mine = pid()
        with template._process.shared._lock:  # as if another thread rendered
            if (child := os.fork()) == 0:
                same = template.render({HELLO}) == "[hello]" and pid() != mine
                sys.exit(0 if same else 3)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, template.render({HELLO}), pid() == mine)
        """
    )
    assert (done.stdout, done.stderr) == ("0 [hello] True\n", "")


def test_no_zombie_process_is_left(run: Any) -> None:
    done = run(
        f"""
        import os
        from vkbackend.errors import InvalidArgument
        template = ChatTemplate("{{% if messages %}}{{{{ [0] * 10 ** 10 }}}}{{% endif %}}")
        for _ in range(2):
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
    assert (done.stdout.split("\n"), done.stderr) == ([*["refused"] * 2, "no children", ""], "")
