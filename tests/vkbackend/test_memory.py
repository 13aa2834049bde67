from __future__ import annotations

import mmap
import os
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import examples
from recordings import buffer, dispatch, recordings

from tests.support.placement import check_placement
from vkbackend.buffer import ALIGN, Home, View, Virtual, aligned
from vkbackend.device_info import limits_of
from vkbackend.errors import OutOfDeviceMemory
from vkbackend.hazards import check
from vkbackend.limits import Limits, plausible
from vkbackend.memory import allocate, lifetimes, pack, plan_scratch
from vkbackend.pages import FilePages, HostPages
from vkbackend.recording import Recording, derive_barriers
from vkbackend.twins.device import NullDevice

pytestmark = pytest.mark.no_vulkan


@given(st.lists(st.integers(0, 5000), max_size=40), st.integers(5120, 20_000))
def test_packing(sizes: list[int], limit: int) -> None:
    packing = pack(sizes, limit)
    assert len(packing.places) == len(sizes)
    used = [0] * len(packing.chunks)
    for (chunk, offset), nbytes in zip(packing.places, sizes, strict=True):
        assert offset % ALIGN == 0 and offset == used[chunk]
        used[chunk] = offset + aligned(nbytes)
    assert used == list(packing.chunks) and all(n <= limit for n in used)
    firsts = [
        next(n for (c, _), n in zip(packing.places, sizes, strict=True) if c == i) for i in range(len(used))
    ]
    assert all(a + aligned(n) > limit for a, n in zip(used, firsts[1:], strict=False))


def test_allocation_in_chunks() -> None:
    device = NullDevice("null", Limits(max_allocation_nbytes=1024))
    views = allocate(
        device, [((4, 32), "f32"), ((0, 8), "f32"), ((4, 32), "f32"), ((3,), "f16")], Home.WEIGHTS, "w"
    )
    assert [(v.offset, v.nbytes) for v in views] == [(0, 512), (512, 0), (512, 512), (0, 8)]
    assert views[0].buffer is views[2].buffer is not views[3].buffer
    assert device.counts["buffer"] == 2 and device.nbytes[Home.WEIGHTS] == 1024 + ALIGN


@settings(max_examples=examples(150), deadline=None)
@given(recordings(virtual=True))
def test_scratch_plan_on_random_recordings(recording: Recording) -> None:
    offsets, total = plan_scratch(recording)
    lives = lifetimes(recording)
    assert offsets.keys() == lives.keys()
    assert all(offset % ALIGN == 0 and offset + v.nbytes <= total for v, offset in offsets.items())
    assert not check_placement(recording, offsets)
    busiest = max(
        sum(aligned(v.nbytes) for v, (first, last) in lives.items() if first <= i <= last)
        for i in range(len(recording.commands))
    )
    assert busiest <= total <= sum(aligned(v.nbytes) for v in lives)
    arena = buffer()
    arena.nbytes = total
    placed = recording.place({v: View(arena, at, (v.nbytes // 4,)) for v, at in offsets.items()})
    assert not check(derive_barriers(placed))


@settings(max_examples=examples(50), deadline=None)
@given(recordings(virtual=True))
def test_without_reuse_values_share_no_bytes(recording: Recording) -> None:
    offsets, total = plan_scratch(recording, reuse=False)
    spans = sorted((at, at + aligned(v.nbytes)) for v, at in offsets.items())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert total == sum(aligned(v.nbytes) for v in offsets)


def test_scratch_of_a_chain_is_reused() -> None:
    values = [Virtual(1024, str(i)) for i in range(20)]
    recording = Recording("chain")
    for a, b in pairwise(values):
        recording.dispatch(dispatch([View(a, 0, (256,))], [View(b, 0, (256,))]))
    assert plan_scratch(recording)[1] == 2048
    assert plan_scratch(recording, reuse=False)[1] == 20 * 1024


def test_placement_check_detects_overlap() -> None:
    a, b = Virtual(512, "a"), Virtual(512, "b")
    recording = Recording("r", [dispatch([View(a, 0, (128,))], [View(b, 0, (128,))])])
    assert not check_placement(recording, {a: 0, b: 512})
    [clash] = check_placement(recording, {a: 0, b: 508})
    assert "<virtual a 512 B>" in clash and "<virtual b 512 B>" in clash


# ---- host pages ----

GROUPS = ("max_groups_x", "max_groups_y", "max_groups_z")


@pytest.mark.parametrize("align", [4096, 16_384, 1 << 16])
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 100_000])
def test_host_pages_are_aligned(nbytes: int, align: int) -> None:
    pages = HostPages(nbytes, align)
    assert pages.address % align == 0 == pages.nbytes % align
    assert max(nbytes, 1) <= pages.nbytes == pages.bytes.size < nbytes + align + 1
    pages.bytes[:] = 7
    assert np.all(pages.bytes == 7)


@pytest.mark.parametrize("page", [16_384, 1 << 16])
def test_pages_of_another_size(monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    """The kernels of some ARM machines have pages of 16 KiB or 64 KiB. Drivers still report 4096."""
    monkeypatch.setattr(mmap, "PAGESIZE", page)
    reported = dict.fromkeys((f.name for f in fields(Limits)), 0) | dict.fromkeys(GROUPS, 0)
    info: Any = SimpleNamespace(limits=plausible(reported | {"host_import_align": 4096}), is_cpu=True)
    assert limits_of(info).host_import_align == page
    pages = HostPages(100, 4096)
    assert pages.nbytes == page and pages.address % page == 0
    file = HostPages(4 * page).bytes
    file[:] = np.arange(4 * page) % 251
    begin, end = page + 4096, 2 * page + 12
    part = FilePages(file, begin, end)
    assert part.address % page == 0 == part.nbytes % page and part.lead == 4096
    assert np.array_equal(part.bytes[part.lead :][: end - begin], file[begin:end])


def test_host_pages_are_private_anonymous_and_not_inherited() -> None:
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("the kernel shows no /proc/self/smaps")
    pages = HostPages(1 << 20)
    header, flags = "", []
    for line in smaps.read_text(encoding="utf-8").splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            header = line if begin <= pages.address < end else ""
        elif header and first == "VmFlags:":
            flags = line.split()[1:]
            break
    assert header.split()[1] == "rw-p" and header.split()[4] == "0", header
    if "me" not in flags:
        pytest.skip(f"every mapping may be executed, but the emulator shows only {flags}")
    assert "wf" in flags, flags


def test_a_forked_child_sees_zeros() -> None:
    """If a child shared the pages, the parent's next write would go to a copy, which the device does not
    read."""
    pages = HostPages(4096)
    pages.bytes[:] = 5
    pid = os.fork()
    if not pid:
        wiped = not pages.bytes.any()
        pages.bytes[:] = 7
        os._exit(0 if wiped else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the child inherited the pages"
    assert np.all(pages.bytes == 5)


def test_too_many_host_pages_are_refused() -> None:
    with pytest.raises(OutOfDeviceMemory, match="use a smaller model or context"):
        HostPages(1 << 62)
