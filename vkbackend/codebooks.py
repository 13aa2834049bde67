"""Codebooks of the I-quants (from the `gguf` package), which dequant_iq.glsl reads as descriptor set 1.

They are not constant arrays in the shaders: lavapipe compiles those at 2 ms a word and refills them in every
invocation.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from vkbackend import shaderlib

_OWNERS = {"iq1_m": "iq1_s"}  # format with the codebook it shares
FORMATS = ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m")


def codebook_of(op: str, variant: str) -> str | None:
    """Format of the codebook that a shader variant reads, or None."""
    owners = [owner for value in shaderlib.manifest()[op][variant].values() if (owner := owner_of(value))]
    return owners[0] if owners else None


def owner_of(dtype: str) -> str | None:
    """Format of the codebook that a format reads, or None."""
    return _OWNERS.get(dtype, dtype) if dtype in FORMATS else None


@cache
def entries(name: str) -> np.ndarray:
    """uint16 [entries]: 8 codes of 2 bits or 4 of 4 bits, the first one lowest. A code indexes the format's
    values in ascending order."""
    from gguf import quants

    kind = getattr(quants, name.upper())
    kind.init_grid()
    codes = np.searchsorted(kind.grid_map, kind.grid.reshape(kind.grid_shape)).astype(np.uint32)
    bits = 16 // codes.shape[1]
    packed = np.bitwise_or.reduce(codes << bits * np.arange(codes.shape[1], dtype=np.uint32), axis=1)
    return np.asarray(packed.astype("<u2"))
