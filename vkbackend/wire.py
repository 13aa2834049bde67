"""Formats in which devices exchange partial sums. A 32-bit word holds one f32 number or two 16-bit numbers,
the first in the low 16 bits.

`bf16` is the upper 16 bits of a float. `f16` consists of a sign, 5 bits of exponent and 11 bits of
significand. `f16` has blocks of 128 elements. A word before each block holds the exponent of the block's
largest element, which adds 1.6% of data. No element overflows, and only elements 2^29 times smaller than the
largest become zero.
"""

from __future__ import annotations

FORMATS = ("f32", "bf16", "f16")  # indexed by WIRE in add_partials.comp
F16_BLOCK = 128


def wire_words(wire: str, elements: int) -> int:
    """Return the number of 32-bit words for `elements` elements, including a word per block of f16."""
    if wire == "f32":
        return elements
    return -(-elements // 2) + (-(-elements // F16_BLOCK) if wire == "f16" else 0)


def wire_block(wire: str) -> int:
    """Return the elements per block. Blocks begin at words, so a sum can only be divided between blocks."""
    return {"f32": 1, "bf16": 2, "f16": F16_BLOCK}[wire]
