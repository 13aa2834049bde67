"""Codebooks of the I-quants as data: what dequant_iq.glsl reads as descriptor set 1.

Constant arrays in the shaders would need no buffer, but lavapipe compiles them at 2 ms a word and fills them
anew in every invocation. The entries are the `gguf` package's.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from vkbackend import shaderlib

_OWNERS = {"iq1_m": "iq1_s"}  # format -> the other format whose codebook it uses
FORMATS = ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m")


def codebook_of(op: str, variant: str) -> str | None:
    """The format whose codebook a shader variant reads, if it reads one."""
    found = [owner for value in shaderlib.manifest()[op][variant].values() if (owner := owner_of(value))]
    return found[0] if found else None


def owner_of(dtype: str) -> str | None:
    """The format whose codebook a format reads, if it reads one."""
    return _OWNERS.get(dtype, dtype) if dtype in FORMATS else None


@cache
def entries(name: str) -> np.ndarray:
    """uint16 [entries]: 8 codes of 2 bits or 4 codes of 4 bits each, the first one lowest; a code is an index
    into the format's ascending values."""
    from gguf import quants

    kind = getattr(quants, name.upper())
    kind.init_grid()
    codes = np.searchsorted(kind.grid_map, kind.grid.reshape(kind.grid_shape)).astype(np.uint32)
    bits = 16 // codes.shape[1]
    packed = np.bitwise_or.reduce(codes << bits * np.arange(codes.shape[1], dtype=np.uint32), axis=1)
    return np.asarray(packed.astype("<u2"))
