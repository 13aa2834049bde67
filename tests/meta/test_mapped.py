"""Devices that read weights directly from the mapped model file compute the same logits, and leave no file
open."""

from __future__ import annotations

import math
import mmap
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS, covering, device_infos, wide
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import examples
from runners import load_runner
from slices import loads, noise, numpy_devices

from vkbackend.buffer import Buffer, Home
from vkbackend.errors import PlanError, UnsupportedFeature
from vkbackend.formats import block_of, row_nbytes
from vkbackend.limits import Limits
from vkbackend.meta.gather import gather
from vkbackend.meta.load import load_weights
from vkbackend.meta.mapped import Piece, windows
from vkbackend.meta.slices import Load, mapped_pieces, run_of
from vkbackend.meta.split import MIRRORED
from vkbackend.pages import FilePages, Pages
from vkbackend.step import Run
from vkbackend.twins.device import NumpyDevice


class Mapping(NumpyDevice):
    """A numpy device that reads the mapped file directly, as software devices do."""

    maps_files = True


class File:
    """A mapped file whose only tensor begins at byte `begin`."""

    def __init__(self, raw: np.ndarray, begin: int = 0) -> None:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(begin) + raw.tobytes())
            file.flush()
            self._all = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        self._begin = begin

    def data(self, name: str) -> np.ndarray:
        return self._all[self._begin :]

    def file(self, name: str) -> tuple[np.ndarray, int]:
        return self._all, self._begin


def noise_in_file(load: Load) -> tuple[Load, np.ndarray]:
    raw = noise(math.prod(load.shape[:-1]) * row_nbytes(load.dtype, load.shape[-1]))
    return replace(load, in_file=True), raw


@settings(max_examples=examples(200), deadline=None)
@given(loads())
def test_contiguous_slices_are_found(case: tuple[Load, int]) -> None:
    """A slice that is read from the mapped file must equal a slice in device memory. Random bytes occur only
    once in the file, so equal bytes mean the right slice."""
    (load, raw), n = noise_in_file(case[0]), case[1]
    devices = numpy_devices(n)
    weights, _ = load_weights(devices, [load], File(raw))
    for d, device in enumerate(devices):
        run = run_of(load, d)
        if load.shared:
            assert run == (0, raw.size)
            continue
        held = b"".join(device.read(view).tobytes() for _, view in weights["w"].pieces[d])
        if run:
            assert held[: run[1] - run[0]] == raw[slice(*run)].tobytes() and len(held) < run[1] - run[0] + 4
        # the bytes of blocks smaller than 4 bytes may equal padding
        elif row_nbytes(load.dtype, block_of(load.dtype)[0]) >= 4:
            assert not held or held[: len(held) - 3] not in raw.tobytes()


@settings(max_examples=examples(200), deadline=None)
@given(loads(), st.sampled_from([1 << 30, 4096]), st.sampled_from([0, 4, 4100]))
def test_mapped_pieces_equal_the_tensor(case: tuple[Load, int], max_range: int, begin: int) -> None:
    (load, raw), n = noise_in_file(case[0]), case[1]
    limits = Limits(max_storage_range=max_range)
    devices = [(Mapping if d % 3 else NumpyDevice)(f"numpy.{d}", limits) for d in range(1, n + 1)]
    try:
        weights, _pages = load_weights(devices, [load], File(raw, begin))
    except PlanError:  # one expert exceeds a binding
        assert max_range == 4096
        return
    for d, device in enumerate(devices):
        homes = {view.buffer.home for _, view in weights["w"].pieces[d] if isinstance(view.buffer, Buffer)}
        wanted = Home.MAPPED if mapped_pieces(load, d, device) else load.home
        assert homes <= {wanted, Home.PAGES if load.shared else wanted}
        assert device.maps_files or wanted is not Home.MAPPED
    assert np.array_equal(gather(devices, weights["w"]), raw)


def test_windows_take_no_more_than_one_allocation() -> None:
    files = [np.zeros(1 << 16, np.uint8) for _ in range(2)]
    load, limit, page = Load("w", (1, 256), "f32", MIRRORED), 5 * mmap.PAGESIZE, mmap.PAGESIZE
    pieces = [Piece(load, 0, (1, 256), file, at) for file in files for at in range(0, 1 << 16, 1024)]
    cut = list(windows(reversed(pieces), limit))
    assert sum(map(len, cut)) == len(pieces) and len(cut) > 2 * 3
    for window in cut:
        assert len({id(piece.file) for piece in window}) == 1
        assert [piece.begin for piece in window] == sorted(piece.begin for piece in window)
        assert FilePages(window[0].file, window[0].begin, window[-1].end).nbytes <= limit
    assert FilePages(files[0], 12, 16).nbytes % page == 0


def test_a_device_that_refuses_gets_a_copy() -> None:
    class Refusing(Mapping):
        def import_pages(self, pages: Pages, label: str) -> Buffer:
            raise UnsupportedFeature("no")

    load, raw = noise_in_file(Load("w", (64, 256), "q4_0", MIRRORED))
    device = Refusing("refusing")
    weights, pages = load_weights([device], [load], File(raw))
    assert not pages and device.nbytes == {Home.WEIGHTS: raw.size} and not device.maps_files
    assert np.array_equal(gather([device], weights["w"]), raw)


def from_removed(path: Path, devices: list[str], **options: Any) -> tuple[np.ndarray, list[dict[str, Any]]]:
    runner = load_runner(path, devices=devices, n_ctx=64, n_ubatch=16, **options)
    try:
        path.unlink()
        return runner.step(list(range(1, 17)), [Run(0, 0, 16, 0)], [15]).copy(), runner.memory()
    finally:
        runner.close()
        assert not any(device.counts for device in runner.mesh.devices)


SETS = [wide(p) if "1" in p.values[0] else p for p in DEVICE_SETS]


@pytest.mark.parametrize(("devices", "name"), covering(SETS, ["w256-IQ3_S", "moe8x-Q4_0"]))
def test_a_model_gives_the_same_from_its_file(
    models: Path, tmp_path: Path, devices: list[str], name: str
) -> None:
    if not all(device_infos()[int(d)].is_cpu for d in devices):
        pytest.skip("only software devices read the file in place")
    path = tmp_path / "model.gguf"
    results = []
    for use_mmap in (True, False):
        shutil.copy(models / f"stories-{name}.gguf", path)
        results.append(from_removed(path, devices, use_mmap=use_mmap))
    (mapped, memory), (copied, copied_memory) = results
    assert np.array_equal(mapped, copied)
    assert all(row["mapped"] for row in memory) and not any(row["mapped"] for row in copied_memory)
    total = [
        sum(row[home] for row in rows for home in ("weights", "shared")) for rows in (memory, copied_memory)
    ]
    assert total[0] < total[1] / (2 if len(devices) == 1 else 1)
