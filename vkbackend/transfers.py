"""Transfers outside of recordings: loading, tests, measurements. Each is done when it returns.

Memory that the host can map is written and read in place; the rest goes through one staging buffer, which
exists only while there is something to load. Runtimes say how bytes get from buffer to buffer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from vkbackend.buffer import Buffer, Home, View
from vkbackend.host_copy import copy_into
from vkbackend.memory import ALIGN
from vkbackend.recording import HOST_HOMES
from vkbackend.runtime import Device

UPLOAD_NBYTES = 16 << 20


class Transfers(ABC):
    """The transfers of one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._upload: Buffer | None = None

    def write(self, view: View, data: np.ndarray) -> None:
        buffer = view.buffer
        assert isinstance(buffer, Buffer) and data.nbytes <= view.nbytes < data.nbytes + 4, (
            view,
            data.nbytes,
        )
        if buffer.host is not None:
            target = buffer.host[view.offset : view.offset + data.nbytes]
            copy_into(target.view(data.dtype).reshape(data.shape), data)
            self._device.flush(buffer)
            return
        upload = self._upload_buffer()
        flat = data.reshape(data.shape[0] if data.ndim > 1 else 1, -1)
        # 4 rows of any format are whole words, and some runtimes copy nothing smaller.
        rows = max(4, UPLOAD_NBYTES // max(1, flat[0].nbytes) // 4 * 4) if flat.size else 1
        offset = view.offset
        for begin in range(0, flat.shape[0], rows):
            raw = np.ascontiguousarray(flat[begin : begin + rows]).reshape(-1).view(np.uint8)
            for at in range(0, raw.size, UPLOAD_NBYTES):
                piece = raw[at : at + UPLOAD_NBYTES]
                copy_into(upload.host[: piece.size], piece)
                self._device.flush(upload)
                self._copy(upload, 0, buffer, offset, piece.size)
                offset += piece.size

    def read(self, view: View) -> np.ndarray:
        buffer = view.buffer
        assert isinstance(buffer, Buffer)
        if buffer.host is not None:
            if buffer.home not in HOST_HOMES:  # recordings order the host behind writes of those homes alone
                self._order()
            self._device.invalidate(buffer)
            return np.array(buffer.host[view.offset : view.end])
        upload, out = self._upload_buffer(), np.empty(view.nbytes, np.uint8)
        for at in range(0, out.size, UPLOAD_NBYTES):
            n = min(UPLOAD_NBYTES, out.size - at)
            self._copy(buffer, view.offset + at, upload, 0, n)
            self._device.invalidate(upload)
            out[at : at + n] = upload.host[:n]
        return out

    def _upload_buffer(self) -> Buffer:
        if self._upload is None:
            self._upload = self._device.buffer(UPLOAD_NBYTES + ALIGN, Home.STAGING, "upload")
        return self._upload

    def drop_upload(self) -> None:
        """Free the upload staging once loading is over."""
        if self._upload is not None:
            self._device.free(self._upload)
            self._upload = None

    @abstractmethod
    def _copy(self, src: Buffer, src_at: int, dst: Buffer, dst_at: int, nbytes: int) -> None:
        """Copy bytes between buffers, behind everything submitted; offsets are multiples of 4."""

    @abstractmethod
    def _order(self) -> None:
        """Order the host behind all writes of the device."""
