"""Memory types are chosen from the types that GPUs' drivers report. Full heaps are handled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vkbackend.buffer import CACHED_KIND, COMBINED_KIND, Home
from vkbackend.errors import DeviceLost, OutOfDeviceMemory, UnsupportedFeature
from vkbackend.vulkan.memory_types import host_kinds, suitable

pytestmark = pytest.mark.no_vulkan


MIB, GIB = 1 << 20, 1 << 30
# For each GPU: (flags, heap) of each memory type, then the types for weights, for staging, and for weights on
# the host. Heap 2 of NVIDIA and AMD is the part of device memory that the host can access without a resizable
# BAR.
DEVICES: dict[str, tuple[list[tuple[int, int]], list[int], list[int], list[int]]] = {
    "nvidia": ([(0, 1), (1, 0), (6, 1), (14, 1), (7, 2)], [1], [3], [2]),
    "nvidia, rdma type first": ([(0x101, 0), (1, 0), (6, 1), (14, 1), (7, 0)], [1], [3, 4], [2, 4]),
    "amd": ([(1, 0), (1, 0), (6, 1), (7, 2), (7, 2), (14, 1), (14, 1)], [0], [5], [2]),
    "amd, device coherent": (
        [(0x1, 0), (0x6, 1), (0x7, 0), (0xE, 1), (0xC1, 0), (0xC6, 1), (0xC7, 0), (0xCE, 1)],
        [0],
        [3, 2],
        [1, 2],
    ),
    "intel, integrated": ([(7, 0), (15, 0)], [0], [1], [0]),
    "intel, discrete": ([(1, 0), (6, 1), (14, 1), (7, 0)], [0], [2, 3], [1, 3]),
    "moltenvk, discrete": ([(1, 0), (14, 1), (10, 1), (0x11, 0)], [0], [1], [1]),
    "moltenvk, integrated": ([(1, 0), (15, 0), (11, 0), (0x11, 0)], [0], [1], [1]),
    "adreno": ([(1, 0), (3, 0), (7, 0), (11, 0), (15, 0), (0x20, 0), (0x21, 0)], [0], [4], [2]),
    "two local heaps": ([(1, 0), (1, 1), (14, 2)], [0, 1], [2], [2]),
    "lavapipe": ([(15, 0)], [0], [0], [0]),
}


@pytest.mark.parametrize("name", DEVICES)
def test_best_type_of_every_heap(name: str) -> None:
    types, *want = DEVICES[name]
    every = (1 << len(types)) - 1
    for homes, suited in zip(((Home.WEIGHTS, Home.KV, Home.SCRATCH), (Home.STAGING,), (Home.HOST,)), want,
                            strict=True):  # fmt: skip
        for home in homes:
            assert suitable(types, every, home) == suited, home


def test_kinds_of_host_memory() -> None:
    kinds = {name: host_kinds(types) for name, (types, *_) in DEVICES.items()}
    both = {COMBINED_KIND, CACHED_KIND}
    assert {name for name, of in kinds.items() if set(of) == both} == {
        *("nvidia", "nvidia, rdma type first", "amd", "amd, device coherent"),
        *("intel, integrated", "intel, discrete", "adreno"),
    }
    assert kinds["lavapipe"] == kinds["moltenvk, discrete"] == (CACHED_KIND,)
    for name, of in kinds.items():
        types = DEVICES[name][0]
        for kind in of:
            best = suitable(types, (1 << len(types)) - 1, Home.HOST, kind)[0]
            assert bool(types[best][0] & 8) == (kind == CACHED_KIND), (name, kind)
        assert suitable(types, (1 << len(types)) - 1, Home.HOST, of[0]) == DEVICES[name][3], name


def test_types_not_allowed_for_a_buffer_are_excluded() -> None:
    types = DEVICES["nvidia, rdma type first"][0]
    assert suitable(types, 0b10000, Home.WEIGHTS) == [4]
    assert suitable(types, 0b01100, Home.WEIGHTS) == [2]
    assert suitable(types, 0b00010, Home.STAGING) == []
    assert suitable([(0x20, 0), (0x10, 0)], 0b11, Home.WEIGHTS) == []


class Probe:
    def __init__(self, types: list[tuple[int, int]], heaps: list[int], room: list[int]) -> None:
        self._types, self._room = types, room
        info = SimpleNamespace(
            name="GPU",
            heaps=[SimpleNamespace(nbytes=n, budget=0) for n in heaps],
            limits={"max_allocation_nbytes": 4 * GIB},
        )
        self._device = SimpleNamespace(name="probe", info=info)
        self.asked: list[int] = []

    def _memory_flags(self) -> None:
        return None

    def _vk_memory(self, info: Any, name: str, nbytes: int, heap: int) -> str:
        assert info.allocationSize == nbytes and self._types[info.memoryTypeIndex][1] == heap
        self.asked.append(heap)
        if nbytes > self._room[heap]:
            raise OutOfDeviceMemory(f"vkAllocateMemory of {name}", requested=nbytes)
        return f"memory of heap {heap}"

    def allocate(self, nbytes: int, home: Home = Home.WEIGHTS, allowed: int = -1) -> tuple[Any, int]:
        from vkbackend.vulkan.memory import Memory

        requirements = SimpleNamespace(size=nbytes, memoryTypeBits=allowed & (1 << len(self._types)) - 1)
        probe: Any = self
        return Memory._allocate(probe, requirements, home, "weights[0]")


@pytest.fixture(autouse=True)
def binding() -> None:
    try:
        import vkbackend.vulkan.vk  # noqa: F401
    except UnsupportedFeature as error:
        pytest.skip(f"no Vulkan loader on this machine: {error}")


def nvidia(*room: int) -> Probe:
    return Probe(DEVICES["nvidia"][0], [8 * GIB, 16 * GIB, 256 * MIB], list(room))


def test_next_heap_is_used_if_the_first_is_full() -> None:
    probe = nvidia(GIB, 16 * GIB, 256 * MIB)
    assert probe.allocate(GIB) == ("memory of heap 0", 1)
    two = Probe([(1, 0), (1, 1), (14, 2)], [8 * GIB] * 3, [MIB, GIB, GIB])
    assert two.allocate(100 * MIB) == ("memory of heap 1", 1) and two.asked == [0, 1]


@pytest.mark.parametrize("home", [Home.WEIGHTS, Home.HOST, Home.STAGING])
def test_a_small_bar_is_never_used(home: Home) -> None:
    """These 256 MiB remain for the host-visible buffers of the driver and of other programs."""
    full = nvidia(MIB, MIB, 256 * MIB)
    with pytest.raises(OutOfDeviceMemory):
        full.allocate(100 * MIB, home)
    assert 2 not in full.asked


def test_too_small_heap_is_not_tried() -> None:
    window_first = Probe([(7, 1), (1, 0)], [8 * GIB, 256 * MIB], [8 * GIB, 256 * MIB])
    assert window_first.allocate(GIB, allowed=0b11) == ("memory of heap 0", 1)
    probe = Probe([(1, 1), (1, 0)], [8 * GIB, 256 * MIB], [8 * GIB, 256 * MIB])
    assert probe.allocate(GIB) == ("memory of heap 0", 1) and probe.asked == [0]


def test_error_names_every_full_heap() -> None:
    probe = nvidia(GIB, 16 * GIB, MIB)
    with pytest.raises(OutOfDeviceMemory) as raised:
        probe.allocate(2 * GIB)
    assert f"no room in heap 0 of {8 * GIB};" in str(raised.value)
    assert (raised.value.requested, raised.value.heap, raised.value.budget) == (2 * GIB, 0, 8 * GIB)
    assert probe.asked == [0] and "vkAllocateMemory" in str(raised.value.__cause__)


def test_size_above_the_allocation_limit() -> None:
    probe = nvidia(8 * GIB, 16 * GIB, 256 * MIB)
    with pytest.raises(OutOfDeviceMemory, match=f"one allocation may take {4 * GIB};"):
        probe.allocate(5 * GIB)
    assert not probe.asked


def test_lost_device_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = nvidia(0, 0, 0)

    def lost(*_: Any) -> None:
        probe.asked.append(0)
        raise DeviceLost("gone")

    monkeypatch.setattr(probe, "_vk_memory", lost)
    with pytest.raises(DeviceLost):
        probe.allocate(MIB)
    assert len(probe.asked) == 1


def test_no_suitable_memory_type() -> None:
    with pytest.raises(UnsupportedFeature, match="no memory type suits weights"):
        Probe([(1, 0)], [GIB], [GIB]).allocate(MIB, Home.STAGING)
