// 16-bit floats with one exponent per block of 128 (vkbackend/wire.py), stored in the block's word `bias`.
// Uses integers only, because drivers round to F16 differently and every device must get the same bits.

// Return how much the exponent of a float exceeds the exponent of its code, at bit 23. `top`: bits of the
// largest finite magnitude, whose code gets exponent 30 of 0..31.
uint f16_bias(uint top) { return max(top & 0x7f800000u, 0x00800000u) - (30u << 23); }

// Return a code with ten bits of fraction, rounded to nearest, ties to even. Floats below 2^-126, or with a
// code exponent below 1, become zero.
uint f16_bits(uint bits, uint bias) {
    const uint size = bits & 0x7fffffffu;
    uint code = 0;
    if (size >= 0x00800000u && int(size - bias) >= 0x00800000) code = (size + 0xfffu + ((size >> 13) & 1u) - bias) >> 13;
    if (size >= 0x7f800000u) code = size > 0x7f800000u ? 0x7f00u : 0x7e00u;
    return ((bits >> 16) & 0x8000u) | code;
}

// Return the exact value of a code. The largest value of a block may have been rounded up to exponent 31; if
// that exceeds the range of float, it becomes inf.
float f16_value(uint pair, uint i, uint bias) {
    const uint code = (i & 1u) == 0u ? pair << 16 : pair;
    const uint size = code >> 3 & 0x0fffe000u;
    uint bits = size == 0u ? 0u : size + bias;
    // With exponent 31 and a fraction other than 0, fraction 0x200 is inf, all others are NaN.
    if (size > 0x0f800000u) bits = size == 0x0fc00000u ? 0x7f800000u : 0x7fc00000u;
    return uintBitsToFloat((code & 0x80000000u) | bits);
}

uint f16_bias_at(uint i) { return i / 128 * 65; }
uint f16_pair_at(uint i) { return i / 2 + i / 128 + 1; }
