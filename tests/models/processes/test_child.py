from __future__ import annotations

import os

import pytest

from vkbackend.models.processes.child import Child, Ended
from vkbackend.models.processes.frames import ANSWERED, ASKED, HEAD
from vkbackend.models.processes.memory_limits import GRAMMAR_MEMORY

pytestmark = pytest.mark.no_vulkan
LARK = b'start: "a"'


def asked(child: Child) -> int:
    return child.exchange((HEAD.pack(len(LARK), 0, ASKED), LARK), 60, ANSWERED)[0]


def test_a_killed_child_is_not_asked_again() -> None:
    """Other files may have the numbers of its pipes, and the thread that reads may not know of the end."""
    child = Child("vkbackend.models.grammar.probe_worker", "a test", GRAMMAR_MEMORY)
    assert child.idle() and asked(child) == ANSWERED and child.idle()
    child.kill()
    pipes = [os.pipe() for _ in range(16)]
    try:
        assert not child.idle()
    finally:
        for descriptor in (descriptor for pair in pipes for descriptor in pair):
            os.close(descriptor)


def test_a_child_that_was_stopped_has_ended() -> None:
    child = Child("vkbackend.models.grammar.probe_worker", "a test", GRAMMAR_MEMORY)
    child.stop()
    with pytest.raises(Ended):
        asked(child)
    assert not child.idle()
