from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vkbackend.errors import UnsupportedFeature

pytestmark = pytest.mark.no_vulkan


@pytest.fixture(scope="module")
def capabilities() -> Any:
    try:
        from vkbackend.vulkan import capabilities
    except UnsupportedFeature as error:
        pytest.skip(f"no Vulkan loader on this machine: {error}")
    return capabilities


@pytest.mark.parametrize(
    ("vendor", "reported", "low", "high", "control", "size"),
    [
        ("Intel", 32, 8, 32, True, 16),
        ("Intel", 32, 8, 32, False, 32),
        ("Intel", 32, 32, 32, True, 32),
        ("AMD", 64, 32, 64, True, 64),
        ("NVIDIA", 32, 32, 32, True, 32),
    ],
)
def test_subgroup_size(
    capabilities: Any, vendor: str, reported: int, low: int, high: int, control: bool, size: int
) -> None:
    features = {"subgroup_min": low, "subgroup_max": high, "subgroup_size_control": control}
    assert capabilities.subgroup_size(vendor, reported, features) == size


@pytest.mark.parametrize("bits", [36, 48, 64])
def test_intervals_of_a_counter_that_wraps(capabilities: Any, bits: int) -> None:
    from vkbackend.vulkan.timestamps import intervals

    ticks = np.array([(1 << bits) - 5, (1 << bits) - 2, 3, 10], np.uint64)
    assert list(intervals(ticks, bits)[1:]) == [3, 5, 7]
