"""A child process renders chat templates, and exchanges messages with its parent."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from struck import SIGNALLED, interrupt_everywhere
from templates import ECHO, user_messages

from vkbackend.errors import Timeout
from vkbackend.models.processes.shared import Shared
from vkbackend.models.text import template_process
from vkbackend.models.text.chat_template import ChatTemplate

pytestmark = pytest.mark.no_vulkan


def test_conversations_of_every_kind_are_rendered_completely() -> None:
    """The parent sends only the difference from the previous conversation."""
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
        assert template.render(user_messages(*talk)) == "".join(f"[{text}]" for text in talk)


def test_a_lost_answer_is_not_the_base_of_the_next() -> None:
    """A signal may arrive just before the parent stores a received answer."""
    template = ChatTemplate(ECHO)
    assert template.render(user_messages("a", "b")) == "[a][b]"
    worker = template._process.shared._worker
    assert worker is not None
    before = worker._last
    assert template.render(user_messages("a", "c")) == "[a][c]" and worker._last != before
    worker._last = [], ""
    assert template.render(user_messages("a", "c", "d")) == "[a][c][d]"


def test_values_other_than_texts_may_change_between_calls() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m | tojson }}{% endfor %}")
    parts = ["a"]
    messages: list[Any] = [{"content": parts}]
    assert template.render(messages) == '{"content": ["a"]}'
    parts.append("b")
    assert template.render(messages) == '{"content": ["a", "b"]}'
    assert template.render([{"role": "u", "content": "a"}]) == '{"role": "u", "content": "a"}'
    assert template.render([{"content": "a", "role": "u"}]) == '{"content": "a", "role": "u"}'


def test_threads_share_a_template() -> None:
    template = ChatTemplate(ECHO)
    failed: list[str] = []

    def render(name: str) -> None:
        for i in range(30):
            if template.render(user_messages(name, str(i))) != f"[{name}][{i}]":
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
        with template._process.shared._lock:
            taken.set()
            over.wait()

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        assert taken.wait(10)
        with pytest.raises(Timeout, match="busy"):
            template.render(user_messages("a"))
    finally:
        over.set()
        thread.join()


def test_interrupts_leave_a_template_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt may arrive at any bytecode. After the interrupt, the template renders the next text
    correctly, without a longer wait."""

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
        thread = threading.Thread(target=lambda: texts.append(template.render(user_messages("b"))))
        thread.start()
        thread.join()
        assert texts == ["[b]"]

    monkeypatch.setattr(template_process, "WALL_S", 0.5)
    use = Shared.use.__code__
    interrupt_everywhere(
        lambda: template.render(user_messages("a")),
        from_another_thread,
        lambda code: code is use,
        after_ops=SIGNALLED,
        least=5,
    )
