"""A transport that sends bytes from node to node over MPI, without pickling.

The transport uses no collectives such as `MPI_Allreduce`, because MPI chooses their order of additions. A
waiting thread polls MPI until a deadline.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from vkbackend.errors import DeviceLost, Timeout, UnsupportedFeature
from vkbackend.meta.transport import Lane, Part, Transfers, Transport

LEAVE_S = 10.0


def require_mpi() -> None:
    if importlib.util.find_spec("mpi4py") is None:
        raise UnsupportedFeature(
            f"several nodes need mpi4py and an MPI, which {sys.prefix} does not have; run "
            "`pip install 'vkbackend[hosts]'`, or `bash tools/setup.sh --hosts` in a checkout"
        )


class MPITransport(Transport):
    """A transport between processes on different nodes, which an MPI launcher starts."""

    def __init__(self) -> None:
        require_mpi()
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI

        if not MPI.Is_initialized() and MPI.Init_thread(MPI.THREAD_MULTIPLE) < MPI.THREAD_MULTIPLE:
            raise UnsupportedFeature(
                "this MPI does not support calls from several threads; use the one of the extra hosts"
            )
        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size = self.comm.rank, self.comm.size
        super().__init__()

    @property
    def library(self) -> str:
        """Return MPI's name and version. All nodes must agree."""
        return " ".join(str(self.mpi.Get_library_version()).split("\n")[0].split())

    def send(self, node: int, lane: Lane, data: bytes, purpose: str = "") -> None:
        self._count(lane, len(data))
        try:
            request = self.comm.Isend([data, self.mpi.BYTE], dest=node, tag=lane)
            self.wait(request.Test, f"{purpose or lane.name.lower()} to reach {self.names[node]}")
        except self.mpi.Exception as error:
            raise self._gone(error) from None

    def beat(self, node: int) -> None:
        try:
            self.comm.Isend([b"", self.mpi.BYTE], dest=node, tag=Lane.BEAT).Free()
        except self.mpi.Exception as error:
            raise self._gone(error) from None

    def poll(self, node: int, lane: Lane, most: int) -> bytes | None:
        status = self.mpi.Status()
        try:
            if not self.comm.Iprobe(source=node, tag=lane, status=status):
                return None
            nbytes = status.Get_count(self.mpi.BYTE)
            if nbytes > most:
                raise self.too_long(node, lane, nbytes, most)
            data = bytearray(nbytes)
            request = self.comm.Irecv([data, self.mpi.BYTE], source=node, tag=lane)
            self.wait(request.Test, f"a {lane.name.lower()} of {self.names[node]}")
        except self.mpi.Exception as error:
            raise self._gone(error) from None
        return bytes(data)

    def transfers(
        self, sent: Sequence[Part], received: Sequence[Part], purpose: str, lane: Lane = Lane.SLOT
    ) -> Transfers:
        return _Persistent(self, sent, received, purpose, lane)

    def _gone(self, error: Exception) -> DeviceLost:
        return DeviceLost(f"the group lost a node: {self.lost or error}; start the group again")

    def close(self) -> None:
        """Wait for the other nodes, then leave MPI. Raises DeviceLost, Timeout."""
        if self.mpi.Is_finalized():
            return
        self.meet("the end of the group", LEAVE_S)
        for node in self.others:  # MPI warns about messages that nobody received
            while self.poll(node, Lane.BEAT, 0) is not None:
                pass
        with suppress(self.mpi.Exception):
            self.mpi.Finalize()


class _Persistent(Transfers):
    def __init__(
        self,
        transport: MPITransport,
        sent: Sequence[Part],
        received: Sequence[Part],
        purpose: str,
        lane: Lane,
    ) -> None:
        comm, byte = transport.comm, transport.mpi.BYTE
        self._transport, self._purpose = transport, purpose
        self._sizes = [part.nbytes for _, part in sent]
        self._nodes = [node for node, _ in (*received, *sent)]
        self._requests: list[Any] = [
            comm.Recv_init([part, byte], source=node, tag=lane) for node, part in received
        ] + [comm.Send_init([part, byte], dest=node, tag=lane) for node, part in sent]

    def start(self) -> None:
        if not self._requests:
            return
        transport, mpi = self._transport, self._transport.mpi
        transport.n_messages += len(self._sizes)
        transport.n_bytes += sum(self._sizes)
        try:
            mpi.Prequest.Startall(self._requests)
        except mpi.Exception as error:
            raise transport._gone(error) from None

    def finish(self) -> None:
        if not self._requests:
            return
        transport, mpi, requests = self._transport, self._transport.mpi, self._requests
        try:
            transport.wait(lambda: mpi.Request.Testall(requests), self._purpose)
        except Timeout as error:
            late = {h for h, request in zip(self._nodes, requests, strict=True) if not request.Test()}
            names = ", ".join(transport.names[h] for h in sorted(late))
            raise Timeout(f"{names} did not answer: {error}") from None
        except mpi.Exception as error:
            raise transport._gone(error) from None

    def close(self) -> None:
        if self._transport.lost:
            return  # a request in progress cannot be freed
        for request in self._requests:
            request.Free()
        self._requests = []
