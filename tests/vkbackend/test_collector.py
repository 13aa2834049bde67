from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from vkbackend.collector import collection_paused

pytestmark = pytest.mark.no_vulkan


@pytest.fixture(autouse=True)
def restore_collector() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_previous_state_is_restored(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled() == enabled
    with pytest.raises(KeyError), collection_paused():
        raise KeyError
    assert gc.isenabled() == enabled


def test_overlapping_pauses_of_two_threads() -> None:
    gc.enable()
    for last in (0, 1):
        pauses = [collection_paused(), collection_paused()]
        for pause in pauses:
            pause.__enter__()
        for pause in (pauses[1 - last], pauses[last]):
            pause.__exit__(None, None, None)
        assert gc.isenabled()
