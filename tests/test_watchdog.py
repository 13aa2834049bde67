from __future__ import annotations

import threading

import pytest
from watchdog import Watchdog

pytestmark = pytest.mark.no_vulkan


def test_a_limit_that_passes_ends_the_test() -> None:
    dog, ended, late = Watchdog(), threading.Event(), threading.Event()
    dog.start(0.01, late.set)
    dog.stop()
    dog.start(60.0, late.set)
    dog.start(0.02, ended.set)  # earlier than the thread would wake
    assert ended.wait(30) and not late.is_set()
    ended.clear()
    dog.start(0.01, ended.set)
    assert ended.wait(30) and not late.is_set()
