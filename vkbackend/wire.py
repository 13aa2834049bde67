"""What partial sums travel as, in words: f32, or two numbers to a word, the first of a pair in the low half.

bf16: the upper halves of floats, with 8 bits of significand. f16: a sign, 5 bits of exponent and 11 of
significand, in blocks of 128 elements, each behind a word that says which exponent the largest of them has.
So nothing overflows, and what becomes zero is 2^29 times smaller than that. A 65th word beside 64 costs 1.6%.
"""

from __future__ import annotations

FORMATS = ("f32", "bf16", "f16")  # by what add_partials.comp calls WIRE
F16_BLOCK = 128


def wire_words(wire: str, elements: int) -> int:
    """How many words so many elements take; where these are whole blocks, also where the next begin."""
    if wire == "f32":
        return elements
    return -(-elements // 2) + (-(-elements // F16_BLOCK) if wire == "f16" else 0)


def wire_block(wire: str) -> int:
    """Elements that begin at a word of their own: parts of a sum are multiples of it."""
    return {"f32": 1, "bf16": 2, "f16": F16_BLOCK}[wire]
