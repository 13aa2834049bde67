"""Random damage to bytes and texts."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

NUMBERS = (
    0,
    1,
    2,
    7,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    1 << 31,
    (1 << 32) - 1,
    1 << 62,
    1 << 63,
    (1 << 64) - 1,
)
HEADER_NBYTES = 600  # Half of the damage is in the first bytes, where files store sizes.


def damaged(rng: random.Random, raw: bytes, pieces: Sequence[bytes] = ()) -> bytes:
    """Return `raw` with one to four changes. A change may insert one of `pieces`."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change(rng, data, pieces)
    return bytes(data)


def _change(rng: random.Random, data: bytearray, pieces: Sequence[bytes]) -> None:
    n = min(len(data), HEADER_NBYTES) if rng.random() < 0.5 else len(data)
    at = rng.randrange(n + 1)
    end = min(len(data), at + rng.choice((1, 1, 2, 4, 8, 64, 4096)))
    kind = rng.randrange(8)
    if kind == 0 and data:
        data[at % len(data)] ^= 1 << rng.randrange(8)
    elif kind == 1 and data:
        data[at % len(data)] = rng.randrange(256)
    elif kind == 2:  # a number with a different size in bytes
        number = struct.pack("<Q", rng.choice(NUMBERS))[: rng.choice((1, 2, 4, 8))]
        data[at : at + len(number)] = number
    elif kind == 3:
        del data[at:end]
    elif kind == 4:
        data[at:at] = data[at:end] * rng.choice((1, 1, 2, 50))
    elif kind == 5:
        del data[at:]
    elif kind == 6 and pieces:
        data[at:at] = rng.choice(pieces)
    else:
        data[at:at] = rng.randbytes(rng.randrange(1, 9))
