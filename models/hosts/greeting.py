"""How hosts of a group greet each other before anything else is said. Each proves that it knows the secret,
which is never sent. Until a host has done so, nothing that it sends is decoded."""

from __future__ import annotations

import hmac
import os
from hashlib import sha256

from vkbackend.errors import DeviceLost
from vkbackend.meta.transport import Lane, Transport

NONCE_NBYTES, MAC_NBYTES = 32, sha256().digest_size
GREET_S = 60.0


def greet(transport: Transport, secret: bytes) -> None:
    """All hosts call it. Raises DeviceLost for a host without the secret, Timeout for one that is silent."""
    if transport.rank:
        _answer(transport, secret)
        return
    for host in transport.others:
        mine = os.urandom(NONCE_NBYTES)
        transport.send(host, Lane.REPLY, mine)
        data = _receive(transport, host, NONCE_NBYTES + MAC_NBYTES)
        theirs, mac = data[:NONCE_NBYTES], data[NONCE_NBYTES:]
        if not hmac.compare_digest(mac, _mac(secret, b"follows", host, mine, theirs)):
            raise DeviceLost(
                f"{transport.names[host]} does not know the group's secret; give all hosts the same"
            )
        transport.send(host, Lane.REPLY, _mac(secret, b"leads", host, mine, theirs))


def _answer(transport: Transport, secret: bytes) -> None:
    mine = os.urandom(NONCE_NBYTES)
    theirs = _receive(transport, 0, NONCE_NBYTES)
    transport.send(0, Lane.REPLY, mine + _mac(secret, b"follows", transport.rank, theirs, mine))
    mac = _receive(transport, 0, MAC_NBYTES)
    if not hmac.compare_digest(mac, _mac(secret, b"leads", transport.rank, theirs, mine)):
        raise DeviceLost("host 0 does not know the group's secret; give all hosts the same")


def _receive(transport: Transport, host: int, nbytes: int) -> bytes:
    data = transport.receive(host, Lane.REPLY, nbytes, "the greeting", GREET_S)
    if len(data) != nbytes:
        raise DeviceLost(f"{transport.names[host]} sent {len(data)} bytes as a greeting, expected {nbytes}")
    return data


def _mac(secret: bytes, role: bytes, host: int, first: bytes, second: bytes) -> bytes:
    """`first` is host 0's nonce. Role and host are part of it, so a MAC does not fit another role or host."""
    return hmac.digest(secret, role + host.to_bytes(4, "big") + first + second, "sha256")
