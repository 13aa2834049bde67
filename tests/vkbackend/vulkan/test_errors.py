"""Every failed Vulkan result raises its typed error."""

from __future__ import annotations

from typing import Any

import pytest

from vkbackend import errors
from vkbackend.env import FEATURES
from vkbackend.errors import (
    DeviceLost,
    InvalidArgument,
    OutOfDeviceMemory,
    Timeout,
    UnsupportedFeature,
    VkbackendError,
)

pytestmark = pytest.mark.no_vulkan


@pytest.fixture(scope="module")
def vk() -> Any:
    try:
        from vkbackend.vulkan import vk
    except UnsupportedFeature as error:
        pytest.skip(f"no Vulkan loader on this machine: {error}")
    return vk


TYPED = {
    "VK_ERROR_DEVICE_LOST": DeviceLost,
    "VK_ERROR_OUT_OF_DEVICE_MEMORY": OutOfDeviceMemory,
    "VK_ERROR_OUT_OF_HOST_MEMORY": OutOfDeviceMemory,
    "VK_ERROR_OUT_OF_POOL_MEMORY": OutOfDeviceMemory,
    "VK_ERROR_FRAGMENTED_POOL": OutOfDeviceMemory,
    "VK_ERROR_FRAGMENTATION": OutOfDeviceMemory,
    "VK_ERROR_TOO_MANY_OBJECTS": OutOfDeviceMemory,
    "VK_TIMEOUT": Timeout,
    "VK_ERROR_EXTENSION_NOT_PRESENT": UnsupportedFeature,
    "VK_ERROR_FEATURE_NOT_PRESENT": UnsupportedFeature,
    "VK_ERROR_LAYER_NOT_PRESENT": UnsupportedFeature,
    "VK_ERROR_INCOMPATIBLE_DRIVER": UnsupportedFeature,
    "VK_ERROR_INVALID_EXTERNAL_HANDLE": UnsupportedFeature,
}


@pytest.mark.parametrize("name", TYPED)
def test_results_with_a_separate_error_type(vk: Any, name: str) -> None:
    with pytest.raises(TYPED[name], match=r"vkFoo of Vulkan7") as caught:
        vk.check(getattr(vk.C, name), "vkFoo of Vulkan7")
    assert type(caught.value) is TYPED[name]


def test_other_failures_raise_vkbackend_error_with_the_result(vk: Any) -> None:
    special = {getattr(vk.C, name) for name in TYPED}
    others = {value: name for value, name in vk.RESULT_NAMES.items() if value not in special}
    assert len(others) > 10
    for value, name in others.items():
        with pytest.raises(VkbackendError, match=f"vkFoo: {name}") as caught:
            vk.check(value, "vkFoo")
        assert type(caught.value) is VkbackendError


def test_unknown_results_and_success(vk: Any) -> None:
    vk.check(vk.C.VK_SUCCESS, "vkFoo")
    with pytest.raises(VkbackendError, match="-123456"):
        vk.check(-123456, "vkFoo")


def test_names_of_results(vk: Any) -> None:
    assert vk.result_of("VK_ERROR_DEVICE_LOST") == vk.C.VK_ERROR_DEVICE_LOST
    for name in ("VK_ERROR_FOO", "hang", "VK_SUCCESS", "VK_STRUCTURE_TYPE_SUBMIT_INFO", "ffi"):
        with pytest.raises(InvalidArgument, match=f"'{name}' is not an error of Vulkan"):
            vk.result_of(name)


def test_feature_names_equal_the_queried_features(device: Any) -> None:
    assert device.info.features.keys() == FEATURES


def test_every_public_error_is_a_vkbackend_error() -> None:
    public = [value for value in vars(errors).values() if isinstance(value, type)]
    assert len(public) == 17 and all(issubclass(value, VkbackendError) for value in public)
    assert issubclass(errors.InvalidArgument, ValueError)


def test_out_of_memory_has_numbers() -> None:
    error = OutOfDeviceMemory("no", requested=5, budget=3, heap=1)
    assert (error.requested, error.budget, error.heap, str(error)) == (5, 3, 1, "no")
