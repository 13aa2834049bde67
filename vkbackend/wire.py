"""The formats in which partial sums travel, as 32-bit words: f32, or two numbers in a word, the first of the
pair in the low half.

bf16: the upper halves of floats, with 8 bits of significand. f16: a sign, 5 bits of exponent and 11 of
significand, in blocks of 128 elements. A word before each block says which exponent its largest element has.
So nothing overflows, and only elements become zero that are 2^29 times smaller than the largest. The 65th
word of a block costs 1.6%.
"""

from __future__ import annotations

FORMATS = ("f32", "bf16", "f16")  # by what add_partials.comp calls WIRE
F16_BLOCK = 128


def wire_words(wire: str, elements: int) -> int:
    """The words that `elements` elements take. If these are whole blocks, the element after them begins at
    that word."""
    if wire == "f32":
        return elements
    return -(-elements // 2) + (-(-elements // F16_BLOCK) if wire == "f16" else 0)


def wire_block(wire: str) -> int:
    """Elements in a block. A block begins at a word of its own, so a sum is cut into parts of whole
    blocks."""
    return {"f32": 1, "bf16": 2, "f16": F16_BLOCK}[wire]
