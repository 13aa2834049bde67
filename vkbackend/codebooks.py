"""Codebooks of GGML's I-quants (IQ2_XXS to IQ1_M), which dequant_iq.glsl reads from descriptor set 1.

The shaders have no constant arrays instead: lavapipe compiles a constant array in 2 ms per word, and fills it
again in every invocation.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from vkbackend import shaderlib

_OWNERS = {"iq1_m": "iq1_s"}
FORMATS = ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m")


def codebook_of(op: str, variant: str) -> str | None:
    """Return the format whose codebook a shader variant reads, or None if the variant reads no codebook."""
    owners = [owner for value in shaderlib.manifest()[op][variant].values() if (owner := owner_of(value))]
    return owners[0] if owners else None


def owner_of(dtype: str) -> str | None:
    """Return the format whose codebook `dtype` uses, or None if `dtype` uses no codebook."""
    return _OWNERS.get(dtype, dtype) if dtype in FORMATS else None


@cache
def entries(name: str) -> np.ndarray:
    """Return a codebook as uint16. Each entry packs 8 codes of 2 bits or 4 codes of 4 bits, lowest bits
    first. A code is an index into the format's sorted values."""
    from gguf import quants

    kind = getattr(quants, name.upper())
    kind.init_grid()
    codes = np.searchsorted(kind.grid_map, kind.grid.reshape(kind.grid_shape)).astype(np.uint32)
    bits = 16 // codes.shape[1]
    packed = np.bitwise_or.reduce(codes << bits * np.arange(codes.shape[1], dtype=np.uint32), axis=1)
    return np.asarray(packed.astype("<u2"))
