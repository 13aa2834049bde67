"""Listen at the addresses of --host: IP addresses, host names, and Unix socket files."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress

from vkbackend.errors import InvalidArgument
from vkbackend.system import socket_files

BACKLOG = 256
SUFFIX = ".sock"  # suffix of a Unix socket's file name, as in llama-server


def is_file(host: str) -> bool:
    return host.endswith(SUFFIX)


def listen_at(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Raises InvalidArgument."""
    if port == 0 and sum(not is_file(host) for host in hosts) > 1:
        raise InvalidArgument("--port 0 chooses a port for one address; give a --port, or one --host")
    socks: list[socket.socket] = []
    try:
        for host in hosts:
            socks.append(listen(host, port))
    except InvalidArgument:
        for sock in socks:
            close(sock)
        raise
    return socks


def listen(host: str, port: int) -> socket.socket:
    """Raises InvalidArgument."""
    try:
        if is_file(host):
            return socket_files.listen_at(host, BACKLOG)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        place = host if is_file(host) else f"{host}:{port}"
        raise InvalidArgument(f"cannot listen at {place}: {error}; choose another --host or --port") from None


def address_of(sock: socket.socket, *, tls: bool) -> str:
    if path := socket_files.path_of(sock):
        return f"unix:{path}"
    host, port = sock.getsockname()[:2]
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"


def close(sock: socket.socket) -> None:
    path = socket_files.path_of(sock)
    sock.close()
    if path:
        with suppress(FileNotFoundError):
            os.unlink(path)
