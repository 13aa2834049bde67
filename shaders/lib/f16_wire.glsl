// A format of 16-bit floats (vkbackend/wire.py). A block of 128 values shares an exponent, stored in the word
// `bias`. The functions use only integers, because all devices need the same bits, but drivers round to F16
// differently.

// Return the exponent of a float minus the exponent of its code, shifted to bit 23. `top` holds the bits of
// the block's largest finite magnitude, whose code has exponent 30.
uint f16_bias(uint top) { return max(top & 0x7f800000u, 0x00800000u) - (30u << 23); }

// Return the code of a float. It has ten bits of fraction, rounded to nearest, ties to even. A float below
// 2^-126, or with a code exponent below 1, becomes zero.
uint f16_bits(uint bits, uint bias) {
    const uint size = bits & 0x7fffffffu;
    uint code = 0;
    if (size >= 0x00800000u && int(size - bias) >= 0x00800000) code = (size + 0xfffu + ((size >> 13) & 1u) - bias) >> 13;
    if (size >= 0x7f800000u) code = size > 0x7f800000u ? 0x7f00u : 0x7e00u;
    return ((bits >> 16) & 0x8000u) | code;
}

// Return the exact value of a code. Rounding may raise a block's largest value to exponent 31. The result is
// inf if it exceeds the range of float.
float f16_value(uint pair, uint i, uint bias) {
    const uint code = (i & 1u) == 0u ? pair << 16 : pair;
    const uint size = code >> 3 & 0x0fffe000u;
    uint bits = size == 0u ? 0u : size + bias;
    // At exponent 31, fraction 0 is a number, fraction 0x200 is inf, and all other fractions are NaN.
    if (size > 0x0f800000u) bits = size == 0x0fc00000u ? 0x7f800000u : 0x7fc00000u;
    return uintBitsToFloat((code & 0x80000000u) | bits);
}

uint f16_bias_at(uint i) { return i / 128 * 65; }
uint f16_pair_at(uint i) { return i / 2 + i / 128 + 1; }
