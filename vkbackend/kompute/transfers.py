"""Transfers with the op copy_words, because kp copies only complete tensors."""

from __future__ import annotations

from vkbackend.buffer import Buffer, View
from vkbackend.errors import OutOfDeviceMemory
from vkbackend.kompute.queues import WorkerDevice, spans
from vkbackend.recording import Copy
from vkbackend.transfers import Transfers


class KomputeTransfers(Transfers):
    """`canaries` maps each buffer to the offset and value of its last written word. Running an executable
    clears `canaries`."""

    def __init__(self, device: WorkerDevice) -> None:
        super().__init__(device)
        self._device = device
        self.canaries: dict[Buffer, tuple[int, bytes]] = {}

    def _copy(self, src: Buffer, src_at: int, dst: Buffer, dst_at: int, nbytes: int) -> None:
        n = -(-nbytes // 4)
        if nbytes % 4 and src is self._upload:  # complete the last word with the bytes that dst holds
            spare = src.nbytes - 4
            self._copy_words(dst, dst_at + 4 * n - 4, src, spare, 1)
            end = src_at + nbytes
            src.host[end : src_at + 4 * n] = src.host[spare + nbytes % 4 : spare + 4]
        self._copy_words(src, src_at, dst, dst_at, n)
        if src is self._upload:
            self.canaries[dst] = dst_at + 4 * n - 4, bytes(src.host[src_at + 4 * n - 4 : src_at + 4 * n])

    def _copy_words(self, src: Buffer, src_at: int, dst: Buffer, dst_at: int, n: int) -> None:
        copy = Copy(View(src, src_at, (n,), "u32"), View(dst, dst_at, (n,), "u32"))
        self._device.call("once", self._device.commands([copy]), *spans([copy]))

    def _order(self) -> None:
        pass  # the worker answers a request only when its work is done

    def check(self) -> None:
        """kp ignores failed allocations, so read the canary words, and raise OutOfDeviceMemory if one has
        another value."""
        for buffer, (offset, wanted) in self.canaries.items():
            got = bytes(self.read(View(buffer, offset, (1,), "u32")))
            if got != wanted:
                device = self._device
                raise OutOfDeviceMemory(
                    f"{device.name} ({device.info.name}): {buffer.label} of {buffer.nbytes} bytes does not "
                    f"hold what was written to it ({got.hex()}, not {wanted.hex()}), so the driver did not "
                    "allocate it or did not copy; use a smaller context or more devices",
                    requested=buffer.nbytes,
                )
        self.canaries.clear()
