"""Wire formats of partial sums in 32-bit words. A word holds one f32 number, or two 16-bit numbers with the
first in the low 16 bits.

bf16 is the upper 16 bits of a float, with 8 bits of significand. f16 has a sign, 5 bits of exponent and 11
bits of significand, in blocks of 128 elements. A word before each block (1.6% more data) has the exponent of
the block's largest element, so nothing overflows and only elements 2^29 times smaller become zero.
"""

from __future__ import annotations

FORMATS = ("f32", "bf16", "f16")  # index: WIRE in add_partials.comp
F16_BLOCK = 128


def wire_words(wire: str, elements: int) -> int:
    """Return the words for `elements` elements. After complete blocks, the next element begins at that
    word."""
    if wire == "f32":
        return elements
    return -(-elements // 2) + (-(-elements // F16_BLOCK) if wire == "f16" else 0)


def wire_block(wire: str) -> int:
    """Return the elements per block. A block begins at a word, so sums are divided into complete blocks."""
    return {"f32": 1, "bf16": 2, "f16": F16_BLOCK}[wire]
