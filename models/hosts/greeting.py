"""Nodes first prove that they know the secret, without sending it. No other message is decoded before this
proof."""

from __future__ import annotations

import hmac
import os
from hashlib import sha256

from vkbackend.errors import DeviceLost
from vkbackend.meta.transport import Lane, Transport

NONCE_NBYTES, MAC_NBYTES = 32, sha256().digest_size
GREET_S = 60.0


def greet(transport: Transport, secret: bytes) -> None:
    """Check, on every node, that all nodes know the secret. Raises DeviceLost for a node without the secret,
    and Timeout for a node that does not answer."""
    if transport.rank:
        _answer(transport, secret)
        return
    for node in transport.others:
        mine = os.urandom(NONCE_NBYTES)
        transport.send(node, Lane.REPLY, mine)
        data = _receive(transport, node, NONCE_NBYTES + MAC_NBYTES)
        theirs, mac = data[:NONCE_NBYTES], data[NONCE_NBYTES:]
        if not hmac.compare_digest(mac, _mac(secret, b"follows", node, mine, theirs)):
            raise DeviceLost(
                f"{transport.names[node]} does not know the group's secret; give all nodes the same"
            )
        transport.send(node, Lane.REPLY, _mac(secret, b"leads", node, mine, theirs))


def _answer(transport: Transport, secret: bytes) -> None:
    mine = os.urandom(NONCE_NBYTES)
    theirs = _receive(transport, 0, NONCE_NBYTES)
    transport.send(0, Lane.REPLY, mine + _mac(secret, b"follows", transport.rank, theirs, mine))
    mac = _receive(transport, 0, MAC_NBYTES)
    if not hmac.compare_digest(mac, _mac(secret, b"leads", transport.rank, theirs, mine)):
        raise DeviceLost("node 0 does not know the group's secret; give all nodes the same")


def _receive(transport: Transport, node: int, nbytes: int) -> bytes:
    data = transport.receive(node, Lane.REPLY, nbytes, "the greeting", GREET_S)
    if len(data) != nbytes:
        raise DeviceLost(f"{transport.names[node]} sent {len(data)} bytes as a greeting, expected {nbytes}")
    return data


def _mac(secret: bytes, role: bytes, node: int, first: bytes, second: bytes) -> bytes:
    """Return a message authentication code (MAC). `first` is node 0's nonce. Role and node restrict the MAC
    to one use."""
    return hmac.digest(secret, role + node.to_bytes(4, "big") + first + second, "sha256")
