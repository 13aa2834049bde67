// Round a float to the nearest bfloat16, ties to even. An overflow becomes inf. NaN becomes a quiet NaN.
uint bf16_bits(uint bits) {
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// Return value i of an array of packed pairs, from its word.
float bf16_value(uint word, uint i) { return uintBitsToFloat((i & 1u) == 0u ? word << 16 : word & 0xffff0000u); }
