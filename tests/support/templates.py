"""Fixtures for chat templates: a template, conversations, and the process that renders templates."""

from __future__ import annotations

from vkbackend.models.text.chat_template import ChatTemplate

ECHO = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


def user_messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def pid_of(template: ChatTemplate) -> int:
    template.render([])
    worker = template._process.shared._worker
    assert worker is not None
    return worker._process.pid
