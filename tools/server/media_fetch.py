"""Fetches an image's file from a host that the operator allowed by name (--allowed-media-host).

A request must not reach other services of the operator's network. So the host is resolved once, all of its
addresses must be global, the connection goes to one of them, and redirects are not followed.
"""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from vkbackend.errors import InvalidArgument
from vkbackend.models.vision.limits import IMAGE_LIMITS

FETCH_S = 10.0
MAX_URL = 2048
PORT = 443
CHUNK = 1 << 16
_HOST = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")


def is_remote(url: Any) -> bool:
    return isinstance(url, str) and url[:8].lower().startswith(("http:", "https:"))


def fetch(name: str, url: str, allowed: Sequence[str]) -> bytes:
    """Return the bytes at `url`. Raises InvalidArgument with a reason that names no address."""
    host, path = checked(name, url, allowed)
    try:
        address = resolved(host)
        with socket.create_connection((address, PORT), timeout=FETCH_S) as plain:
            with ssl.create_default_context().wrap_socket(plain, server_hostname=host) as secure:
                timer = threading.Timer(FETCH_S, _shut, (secure,))
                timer.start()
                try:
                    return _get(secure, host, path)
                finally:
                    timer.cancel()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise InvalidArgument(f"{name}: {host} was not read: {_reason(error)}", argument=name) from None


def checked(name: str, url: str, allowed: Sequence[str]) -> tuple[str, str]:
    """Return host and path of a URL. Raises InvalidArgument unless it is https on a host in `allowed`."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    is_plain = parts.username is None and parts.password is None and port in (None, PORT)
    is_printable = len(url) <= MAX_URL and url.isascii() and url.isprintable() and " " not in url
    if parts.scheme != "https" or not is_plain or not is_printable or host not in allowed:
        raise InvalidArgument(
            f"{name}={url[:60]!r}: not an https URL of an allowed host (--allowed-media-host)", argument=name
        )
    return host, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def checked_hosts(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names in lower case. Raises InvalidArgument for an address or a pattern."""
    hosts = tuple(name.lower() for name in names)
    for host in hosts:
        if not _HOST.fullmatch(host) or "." not in host or host.replace(".", "").isdigit():
            raise InvalidArgument(
                f"--allowed-media-host {host!r}: expected a name such as images.example.com"
            )
    return hosts


def resolved(host: str) -> str:
    """Return an address of the host. Raises OSError if any of its addresses is not global."""
    addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(host, PORT, type=socket.SOCK_STREAM)]
    if not addresses or not all(ipaddress.ip_address(a.partition("%")[0]).is_global for a in addresses):
        raise OSError("the name has an address that is not global")
    return addresses[0]


def _shut(secure: ssl.SSLSocket) -> None:
    """End all reads of a connection that wait in other threads."""
    with suppress(OSError):
        secure.shutdown(socket.SHUT_RDWR)


def _get(secure: ssl.SSLSocket, host: str, path: str) -> bytes:
    connection = http.client.HTTPConnection(host)
    connection.sock = secure
    connection.request("GET", path, headers={"accept": "image/*", "accept-encoding": "identity"})
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"status {response.status}")
    pieces, n_bytes = [], 0
    while piece := response.read1(CHUNK):
        pieces.append(piece)
        n_bytes += len(piece)
        if n_bytes > IMAGE_LIMITS.n_bytes:
            raise ValueError(f"more than {IMAGE_LIMITS.n_bytes >> 20} MiB")
    return b"".join(pieces)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"it took more than {FETCH_S:.0f} s"
    if isinstance(error, ssl.SSLError):
        return "its certificate is not valid"
    return str(error).partition("\n")[0][:100] or type(error).__name__
