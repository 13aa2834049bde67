"""A hostfile has a line per node. The first line is node 0, which is this machine.

Lines without an address apply to the group. `launcher=` is ssh (default), manual (prints a command per node)
or a program that takes ssh's arguments. `secret=` is a file on all nodes. By default each group gets a new
secret. `pass=` names more environment variables for the other nodes. `public=yes` allows public addresses.

An example:

# address devices other settings 10.0.0.1 dev=0,1 10.0.0.2 dev=0 model=/data/model.gguf interface=eth1
"""

from __future__ import annotations

import ipaddress
import shlex
import socket
from dataclasses import dataclass, field
from pathlib import Path

from vkbackend.errors import InvalidArgument
from vkbackend.ops import MAX_SLOTS

MAX_NBYTES = 1 << 16
OWN, COMMON = ("dev", "model", "interface", "python"), ("launcher", "secret", "pass", "public")
SHARED = ipaddress.ip_network("100.64.0.0/10")  # addresses that carriers and VPNs use


@dataclass(frozen=True, slots=True)
class NodeLine:
    address: str
    devices: tuple[str, ...]
    model: str | None = None
    interface: str | None = None
    python: str | None = None


@dataclass(frozen=True, slots=True)
class HostFile:
    lines: tuple[NodeLine, ...]
    launcher: str = "ssh"
    secret: str | None = None
    passed: tuple[str, ...] = ()
    addresses: tuple[str, ...] = field(default=())  # numeric

    @property
    def places(self) -> tuple[str, ...]:
        return tuple(f"{n}/{device}" for n, node in enumerate(self.lines) for device in node.devices)


def read_hostfile(path: str) -> HostFile:
    """Raises InvalidArgument, also for public addresses without `public=yes`."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_NBYTES + 1)
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"hostfile {path}: cannot be read: {error}; name a text file of nodes"
        ) from None
    if len(text) > MAX_NBYTES:
        raise InvalidArgument(
            f"hostfile {path}: longer than {MAX_NBYTES} characters; it has a line for each node"
        )
    return parse_hosts(text, path)


def parse_hosts(text: str, path: str) -> HostFile:
    lines: list[NodeLine] = []
    common: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        where = f"hostfile {path}, line {number}"
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise InvalidArgument(f"{where}: {error}") from None
        if not words:
            continue
        if "=" in words[0]:
            common |= _settings(words, COMMON, where)
            continue
        address, given = words[0], _settings(words[1:], OWN, where)
        if address.startswith("-"):
            raise InvalidArgument(f"{where}: {address!r} is not an address")
        devices = tuple(filter(None, given.pop("dev", "0").split(",")))
        lines.append(NodeLine(address, devices, **given))
    n_devices = sum(len(node.devices) for node in lines)
    if len(lines) < 2 or not 0 < n_devices <= MAX_SLOTS:
        raise InvalidArgument(
            f"hostfile {path}: {len(lines)} nodes with {n_devices} devices; name two nodes or more, with at "
            f"most {MAX_SLOTS} devices (dev=0,1) in all"
        )
    if (public := common.get("public", "no")) not in ("yes", "no"):
        raise InvalidArgument(f"hostfile {path}: public={public!r}: there are yes and no")
    addresses = tuple(_resolved(node.address) for node in lines)
    for node, address in zip(lines, addresses, strict=True):
        if public == "no" and not is_private(address):
            raise InvalidArgument(
                f"hostfile {path}: {node.address} ({address}) is not a private address, and MPI neither "
                "encrypts nor authenticates its messages; use a private network or WireGuard, or say "
                "public=yes"
            )
    launcher, secret = common.get("launcher", "ssh"), common.get("secret")
    passed = tuple(filter(None, common.get("pass", "").split(",")))
    return HostFile(tuple(lines), launcher, secret, passed, addresses)


def is_private(address: str) -> bool:
    number = ipaddress.ip_address(address)
    return (number.is_private and not number.is_unspecified) or (number.version == 4 and number in SHARED)


def secret_of(path: str) -> bytes:
    """Raises InvalidArgument if other users may read the file."""
    try:
        file = Path(path)
        if (mode := file.stat().st_mode & 0o077) or not 16 <= file.stat().st_size <= 4096:
            problem = "others may read it" if mode else "it must have 16 to 4096 bytes"
            raise InvalidArgument(
                f"secret {path}: {problem}; make it with `umask 077; head -c 32 /dev/urandom > FILE`"
            )
        return file.read_bytes()
    except OSError as error:
        raise InvalidArgument(
            f"secret {path}: cannot be read: {error}; every node needs the same file"
        ) from None


def _settings(words: list[str], known: tuple[str, ...], where: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value or name not in known or name in settings:
            raise InvalidArgument(f"{where}: {word!r} is none of {', '.join(f'{name}=' for name in known)}")
        settings[name] = value
    return settings


def _resolved(address: str) -> str:
    try:
        return str(socket.getaddrinfo(address, None, proto=socket.IPPROTO_TCP)[0][4][0]).partition("%")[0]
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(
            f"host {address!r} has no address: {error}; give one, or a name that resolves"
        ) from None
