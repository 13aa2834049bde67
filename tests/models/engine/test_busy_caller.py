"""A busy thread beside an engine in a process of its own (tools/studies/bench_caller.py measures it)."""

from __future__ import annotations

import pytest
from device_sets import device_infos

from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.studies.bench_caller import measure


@pytest.mark.wide  # a measurement: other work on the machine shows in it
@pytest.mark.skipif(not device_infos(), reason="no Vulkan device is present")
def test_a_busy_caller_costs_little() -> None:
    quiet, busy = measure(demo_model(), ("0", "0"), True, 32, 5)
    assert busy < 1.5 * quiet, f"{quiet:.0f} us per reduce, {busy:.0f} beside a busy thread"
