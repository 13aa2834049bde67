from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vkbackend.errors import InvalidArgument, UnsupportedFeature

pytestmark = pytest.mark.no_vulkan


PRESENT: list[Any] = [
    SimpleNamespace(index=0, name="Radeon RX 7900 XTX", uuid="00000000-0300-0000-0000-000000000000"),
    SimpleNamespace(index=1, name="Radeon RX 7800 XT", uuid="00000000-0400-0000-0000-000000000000"),
    SimpleNamespace(index=10, name="Arc A770", uuid="8680a056-0800-0000-0300-abcdef000000"),
]


@pytest.fixture(scope="module")
def select() -> Any:
    try:
        from vkbackend.vulkan.instance import select
    except UnsupportedFeature as error:
        pytest.skip(f"no Vulkan loader on this machine: {error}")
    return select


@pytest.mark.parametrize(
    ("word", "index"),
    [(0, 0), ("1", 1), (" 10 ", 10), ("Vulkan1", 1), ("arc", 10), ("Radeon RX 7900 XTX", 0),
     ("8680A056-0800-0000-0300-ABCDEF000000", 10)],
)  # fmt: skip
def test_one_device(select: Any, word: str | int, index: int) -> None:
    assert select(word, PRESENT).index == index


@pytest.mark.parametrize(
    ("word", "message"),
    [("radeon", "matches 2 devices"), ("", "names no device"), ("-1", "names no device"), (2, "1 .Radeon"),
     ("7800", "names no device"), ("CUDA0", "there is Vulkan0"), ("none", "numpy to compute without Vulkan"),
     ("GeForce", "0 .Radeon RX 7900 XTX.*Give an index, a UUID or a unique name")],
)  # fmt: skip
def test_none_or_several(select: Any, word: str | int, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        select(word, PRESENT)
