"""Fixtures for chat templates: a template, conversations, and the process that renders templates."""

from __future__ import annotations

import time
from pathlib import Path

from vkbackend.models.text.chat_template import ChatTemplate

ECHO = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
GIVE_UP_S = 30.0


def user_messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def pid_of(template: ChatTemplate) -> int:
    template.render([])
    worker = template._process.shared._worker
    assert worker is not None
    return worker._process.pid


def process_ends(pid: int) -> bool:
    deadline = time.monotonic() + GIVE_UP_S
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
