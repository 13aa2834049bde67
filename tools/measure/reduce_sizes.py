"""Selects all-reduces by message size and by number of exchanges submitted ahead."""

from __future__ import annotations

import re

from vkbackend.errors import InvalidArgument

SIZES = "4K,16K,64K,256K,1M,4M,16M,32M"
AHEAD = "0,1,4,all"


def parse_size(text: str) -> int:
    """Parse a size such as "4K", "32M" or 64. The number of bytes must be a multiple of 4. Above 16K it must
    be a multiple of 16K (rows of 4,096 floats)."""
    match = re.fullmatch(r"([0-9]{1,9})([KkMm]?)", text)
    nbytes = int(match[1]) << {"": 0, "k": 10, "m": 20}[match[2].lower()] if match else 0
    if not 4 <= nbytes <= 1 << 28 or nbytes % min(16_384, nbytes // 4 * 4):
        raise InvalidArgument(
            f"--sizes {text!r}: expected bytes up to 256M, for example 4K: multiples of 4, above 16K of 16K"
        )
    return nbytes
