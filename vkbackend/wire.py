"""Wire formats of partial sums in 32-bit words: f32, or two numbers per word, the first in the low half.

bf16: upper halves of floats, with 8 bits of significand. f16: sign, 5 bits of exponent and 11 of significand,
in blocks of 128 elements. A word before each block (1.6% more) has the exponent of its largest element, so
nothing overflows and only elements 2^29 times smaller become zero.
"""

from __future__ import annotations

FORMATS = ("f32", "bf16", "f16")  # index: WIRE in add_partials.comp
F16_BLOCK = 128


def wire_words(wire: str, elements: int) -> int:
    """Words of `elements` elements. After whole blocks, the next element begins at that word."""
    if wire == "f32":
        return elements
    return -(-elements // 2) + (-(-elements // F16_BLOCK) if wire == "f16" else 0)


def wire_block(wire: str) -> int:
    """Elements of a block. Blocks begin at words, so sums are cut into whole blocks."""
    return {"f32": 1, "bf16": 2, "f16": F16_BLOCK}[wire]
