"""Network interfaces of this machine, and ports of this process (Linux)."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str | None:
    wanted = ipaddress.ip_address(address)
    for _, name in socket.if_nameindex():
        if wanted in addresses_of(name):
            return name
    return None


def addresses_of(name: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    addresses: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    import fcntl  # not on Windows, where `vkbackend hosts --help` works

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        request = struct.pack("256s", name.encode()[:15])
        addresses.append(ipaddress.IPv4Address(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]))
    with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as lines:
        for words in map(str.split, lines):
            if words[5] == name:
                addresses.append(ipaddress.IPv6Address(int(words[0], 16)))
    return addresses


def listening_ports() -> list[str]:
    """Return ADDRESS:PORT of each TCP socket on which this process listens."""
    sockets = set()
    with suppress(OSError):
        for fd in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                target = os.readlink(fd)
                if target.startswith("socket:["):
                    sockets.add(target[8:-1])
    ports = []
    for table in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/net/{table}", encoding="ascii") as lines:
            next(lines)
            for words in map(str.split, lines):
                if words[3] == "0A" and words[9] in sockets:
                    host, port = words[1].split(":")
                    ports.append(f"{_address(host)}:{int(port, 16)}")
    return sorted(ports)


def _address(text: str) -> str:
    """Convert an address from /proc/net, where 32-bit words have the processor's byte order."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    raw = b"".join(struct.pack("=I", word) for word in words)
    return str(ipaddress.ip_address(raw))
