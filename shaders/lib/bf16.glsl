// bfloat16 as 16 bits: the upper half of a float.

// Nearest bfloat16, ties to even; overflow gives inf, NaN a quiet NaN.
uint bf16_bits(uint bits) {
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// Value i of packed pairs, in `word`.
float bf16_value(uint word, uint i) { return uintBitsToFloat((i & 1u) == 0u ? word << 16 : word & 0xffff0000u); }
