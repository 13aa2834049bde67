"""A caller's busy thread beside an engine in a process of its own: python -m vkbackend.tools.bench_caller."""

from __future__ import annotations

import pytest
from conftest import device_infos

from vkbackend.tools.bench_caller import measure
from vkbackend.tools.generation import demo_model


@pytest.mark.wide  # a measurement: other work on the machine shows in it
@pytest.mark.skipif(not device_infos(), reason="no Vulkan device is present")
def test_a_busy_caller_costs_little() -> None:
    quiet, busy = measure(demo_model(), ("0", "0"), True, 32, 5)
    assert busy < 1.5 * quiet, f"{quiet:.0f} us per reduce, {busy:.0f} beside a busy thread"
