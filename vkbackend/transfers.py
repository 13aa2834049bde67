"""Synchronous transfers outside recordings, for loading, tests and measurements.

The host accesses host-visible memory directly. For other memory, a staging buffer exists during loading.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from vkbackend.buffer import ALIGN, Buffer, Home, View
from vkbackend.host_copy import copy_into
from vkbackend.recording import HOST_HOMES

Region = tuple[Any, int, Any, int, int]  # source, its offset, target, its offset, bytes
UPLOAD_NBYTES = 32 << 20  # Size of the staging buffer, whose two halves are used in turn.


class Memory(Protocol):
    """Device methods that the staging buffer needs."""

    def buffer(self, nbytes: int, home: Home, label: str) -> Buffer: ...

    def free(self, buffer: Buffer) -> None: ...

    def flush(self, buffer: Buffer) -> None: ...

    def invalidate(self, buffer: Buffer) -> None: ...


class Transfers(ABC):
    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._upload: Buffer | None = None
        self._thread: ThreadPoolExecutor | None = None

    def write(self, view: View, data: np.ndarray) -> None:
        buffer = view.buffer
        assert isinstance(buffer, Buffer) and data.nbytes <= view.nbytes < data.nbytes + 4, (
            view,
            data.nbytes,
        )
        if buffer.host is not None:
            target = buffer.host[view.offset : view.offset + data.nbytes]
            copy_into(target.view(data.dtype).reshape(data.shape), data)
            self._memory.flush(buffer)
            return
        upload, half = self._upload_buffer(), UPLOAD_NBYTES // 2
        offset, sent = view.offset, None
        for i, piece in enumerate(_pieces(data, half)):
            at = i % 2 * half  # the host fills half of the buffer while the device copies the other half
            filled = self._filler().submit(copy_into, upload.host[at : at + piece.size], piece)
            if sent:
                self._send(*sent)
            sent = filled, at, buffer, offset, piece.size
            offset += piece.size
        if sent:
            self._send(*sent)

    def _send(self, filled: Future[None], at: int, buffer: Buffer, offset: int, nbytes: int) -> None:
        upload = self._upload_buffer()
        filled.result()
        self._memory.flush(upload)
        self._copy(upload, at, buffer, offset, nbytes)

    def read(self, view: View) -> np.ndarray:
        buffer = view.buffer
        assert isinstance(buffer, Buffer)
        if buffer.host is not None:
            if buffer.home not in HOST_HOMES:  # Recordings make only HOST_HOMES visible to the host.
                self._order()
            self._memory.invalidate(buffer)
            return np.array(buffer.host[view.offset : view.end])
        upload, out = self._upload_buffer(), np.empty(view.nbytes, np.uint8)
        for at in range(0, out.size, UPLOAD_NBYTES):
            n = min(UPLOAD_NBYTES, out.size - at)
            self._copy(buffer, view.offset + at, upload, 0, n)
            self._memory.invalidate(upload)
            out[at : at + n] = upload.host[:n]
        return out

    def read_many(self, views: Sequence[View]) -> list[np.ndarray]:
        """Read several views. If all are mapped, wait only once. Otherwise, copy to the staging buffer in one
        submission."""
        buffers = {view.buffer for view in views if isinstance(view.buffer, Buffer)}
        if views and all(buffer.host is not None for buffer in buffers):
            if any(buffer.home not in HOST_HOMES for buffer in buffers):
                self._order()
            for buffer in buffers:
                self._memory.invalidate(buffer)
            return [np.array(_host(view)) for view in views]
        if any(buffer.host is not None for buffer in buffers) or sum(v.nbytes for v in views) > UPLOAD_NBYTES:
            return [self.read(view) for view in views]
        upload, copies, at = self._upload_buffer(), list[Region](), 0
        for view in views:
            copies.append((view.buffer, view.offset, upload, at, view.nbytes))
            at += view.nbytes
        if copies:
            self._copies(copies)
            self._memory.invalidate(upload)
        return [np.array(upload.host[at : at + nbytes]) for *_, at, nbytes in copies]

    def write_many(self, parts: Sequence[tuple[View, np.ndarray]]) -> None:
        """Write several views. Copies share a submission."""
        hosts = [view.buffer.host for view, _ in parts if isinstance(view.buffer, Buffer)]
        if any(host is not None for host in hosts) or sum(v.nbytes for v, _ in parts) > UPLOAD_NBYTES:
            for view, data in parts:
                self.write(view, data)
            return
        upload, copies, at = self._upload_buffer(), list[Region](), 0
        for view, data in parts:
            assert data.nbytes <= view.nbytes < data.nbytes + 4, (view, data.nbytes)
            upload.host[at : at + data.nbytes] = data.reshape(-1).view(np.uint8)
            copies.append((upload, at, view.buffer, view.offset, data.nbytes))
            at += view.nbytes
        if copies:
            self._memory.flush(upload)
            self._copies(copies)

    def _upload_buffer(self) -> Buffer:
        if self._upload is None:
            self._upload = self._memory.buffer(UPLOAD_NBYTES + ALIGN, Home.STAGING, "upload")
        return self._upload

    def _filler(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "vkbackend-upload")
        return self._thread

    def write_once(self, view: View, data: np.ndarray) -> None:
        """Write, and free the staging buffer unless it existed before."""
        kept = self._upload is not None
        self.write(view, data)
        if not kept:
            self.drop_upload()

    def drop_upload(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self._upload is not None:
            self._memory.free(self._upload)
            self._upload = None

    @abstractmethod
    def _copy(self, src: Buffer, src_at: int, dst: Buffer, dst_at: int, nbytes: int) -> None:
        """Copy bytes between buffers after all submitted work. Offsets are multiples of 4."""

    def _copies(self, copies: Sequence[Region]) -> None:
        for copy in copies:
            self._copy(*copy)

    @abstractmethod
    def _order(self) -> None:
        """Wait for the device and make its writes visible to the host."""


def _host(view: View) -> np.ndarray:
    assert isinstance(view.buffer, Buffer)
    return np.asarray(view.buffer.host[view.offset : view.end])


def _pieces(data: np.ndarray, nbytes: int) -> Iterator[np.ndarray]:
    """Yield an array's bytes as uint8 arrays of at most `nbytes`. All arrays except the last have a multiple
    of 4 bytes."""
    flat = data.reshape(data.shape[0] if data.ndim > 1 else 1, -1)
    # Some runtimes copy only multiples of 4 bytes. In every format, 4 rows are a multiple of 4 bytes.
    rows = max(4, nbytes // max(1, flat[0].nbytes) // 4 * 4) if flat.size else 1
    for begin in range(0, flat.shape[0], rows):
        raw = np.ascontiguousarray(flat[begin : begin + rows]).reshape(-1).view(np.uint8)
        for at in range(0, raw.size, nbytes):
            yield raw[at : at + nbytes]
