"""Unix sockets, which are files. Python has none on Windows."""

from __future__ import annotations

import os
import socket
import stat
import sys
from contextlib import suppress

if sys.platform == "win32":

    def listen_at(path: str, backlog: int) -> socket.socket:
        raise OSError("Python has no Unix sockets on Windows")

    def path_of(sock: socket.socket) -> str | None:
        return None

else:

    def listen_at(path: str, backlog: int) -> socket.socket:
        """Replace the file if it is a socket that no process serves. Raises OSError."""
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode) and not _is_served(path):
                os.unlink(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(path)
            sock.listen(backlog)
        except BaseException:
            sock.close()
            raise
        return sock

    def path_of(sock: socket.socket) -> str | None:
        """Return the file of an open Unix socket, and None for other sockets."""
        if sock.family != socket.AF_UNIX or sock.fileno() < 0:
            return None
        return str(sock.getsockname())

    def _is_served(path: str) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            try:
                sock.connect(path)
            except ConnectionRefusedError:
                return False
            return True
