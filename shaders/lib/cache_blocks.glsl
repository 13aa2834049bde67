// Quantize blocks of 32 elements of x with the bits of ggml's reference. The scale d is
// Q8_0: max|x| / 127     Q4_0, Q5_0: the x of the largest magnitude / -8 or -16
// Q4_1, Q5_1: (max - min) / 15 or 31, with m = min
// IQ4_NL: sum w x v / sum w v^2 with w = x^2 and the values v of the codes, which are chosen with the x of the
// largest magnitude / -127 as d.
// If an x, or max - min, is infinite or NaN, d is NaN and the codes are as for zeros. A block is the 16-bit d,
// or d and m in one word, and WORDS words.

const bool HAS_MINIMUM = TYPE == CACHE_Q4_1 || TYPE == CACHE_Q5_1;
const bool HAS_FIFTH_BITS = TYPE == CACHE_Q5_0 || TYPE == CACHE_Q5_1;
const uint WORDS = TYPE == CACHE_Q8_0 ? 8 : (HAS_FIFTH_BITS ? 5 : 4);
const float DIVISOR = TYPE == CACHE_Q8_0 || TYPE == CACHE_IQ4_NL ? 127.0 : (TYPE == CACHE_Q4_1 ? 15.0 : (TYPE == CACHE_Q5_1 ? 31.0 : 0.0));

struct Scale {
    uint bits; // d, and m in the upper half
    float inverse; // 1 / d before rounding
    float minimum; // the value of code 0
    bool used; // false: all values are coded as 0
};

uint code8(float value, float inverse) {
    precise float scaled = value * inverse;
    precise float mag = abs(scaled);
    precise float whole = floor(mag);
    precise float rounded = whole + floor(2.0 * (mag - whole)); // ties away from zero
    return uint(int(scaled < 0.0 ? -rounded : rounded)) & 0xffu;
}

// Return the code of the nearest value of IQ4_NL. A binary search finds the bits from the highest to the
// lowest. A tie takes the larger value.
uint iq4_code(float v) {
    const bool b8 = v >= -4.5;
    const bool b4 = v >= (b8 ? 45.5 : -57.0);
    const bool b2 = v >= (b8 ? (b4 ? 79.0 : 19.0) : (b4 ? -28.5 : -93.5));
    const float least_above = b4 ? (b2 ? 101.0 : 61.0) : (b2 ? 31.5 : 7.0);
    const float least_below = b4 ? (b2 ? -16.0 : -42.0) : (b2 ? -74.0 : -115.5);
    const bool b1 = v >= (b8 ? least_above : least_below);
    return (b8 ? 8u : 0u) | (b4 ? 4u : 0u) | (b2 ? 2u : 0u) | (b1 ? 1u : 0u);
}

// Return the code of element `at` of x.
uint code_of(uint at, Scale scale) {
    const float value = scale.used ? x[at] : 0.0;
    if (TYPE == CACHE_Q8_0) return code8(value, scale.inverse);
    precise const float scaled = (HAS_MINIMUM ? value - scale.minimum : value) * scale.inverse;
    if (TYPE == CACHE_IQ4_NL) return iq4_code(scaled);
    precise const float shifted = scaled + (HAS_MINIMUM ? 0.5 : (TYPE == CACHE_Q4_0 ? 8.5 : 16.5));
    return uint(min(int(shifted), HAS_FIFTH_BITS ? 31 : 15));
}

// Return the least-squares d of IQ4_NL.
float fitted(uint from, float inverse) {
    precise float sum_x = 0.0;
    precise float sum_v = 0.0;
    for (uint i = 0; i < BLOCK; ++i) {
        precise const float value = x[from + i];
        precise const float v = float(iq4_values(uvec4(iq4_code(exact_mul(value, inverse)))).x);
        precise const float weighted = value * value * v;
        sum_x += weighted * value;
        sum_v += weighted * v;
    }
    const float magnitude = divide(abs(sum_x), sum_v);
    return sum_x < 0.0 ? -magnitude : magnitude;
}

Scale scale_of(uint from) {
    float top = 0.0;
    float low = x[from];
    float high = low;
    bool is_finite = true;
    for (uint i = 0; i < BLOCK; ++i) {
        const float value = x[from + i];
        if (abs(value) > abs(top)) top = value;
        if (value < low) low = value;
        if (value > high) high = value;
        is_finite = is_finite && (floatBitsToUint(value) & 0x7fffffffu) < 0x7f800000u;
    }
    precise const float span = HAS_MINIMUM ? high - low : abs(top);
    if (!is_finite || floatBitsToUint(span) >= 0x7f800000u) return Scale(0x7e00u, 0.0, 0.0, false);
    const bool is_zero = span < 1.0e-29; // far below the smallest F16
    float d = span;
    if (TYPE == CACHE_Q4_0) d = top * -0.125;
    if (TYPE == CACHE_Q5_0) d = top * -0.0625;
    if (DIVISOR > 0.0 && !is_zero) d = divide(span, DIVISOR);
    if (TYPE == CACHE_IQ4_NL && top > 0.0 && !is_zero) d = -d;
    const float magnitude = is_zero ? 0.0 : divide(1.0, abs(d));
    const float inverse = d < 0.0 ? -magnitude : magnitude;
    // The sums of `fitted` are normal numbers in this range; beyond it d is 0 or inf in F16.
    if (TYPE == CACHE_IQ4_NL && span > 1.0e-11 && span < 1.0e11) d = fitted(from, inverse);
    if (HAS_MINIMUM) return Scale(half_bits(d) | (half_bits(low) << 16), inverse, low, true);
    return Scale(half_bits(d), inverse, 0.0, true);
}

// Return word i of a block's words after its scale.
uint word_of(uint from, uint i, Scale scale) {
    uint word = 0u;
    if (HAS_FIFTH_BITS && i == 0) {
        for (uint j = 0; j < BLOCK; ++j) word |= (code_of(from + j, scale) >> 4) << j;
        return word;
    }
    const uint first = from + 4 * (HAS_FIFTH_BITS ? i - 1 : i);
    for (uint j = 0; j < 4; ++j) {
        uint code = code_of(first + j, scale);
        if (TYPE != CACHE_Q8_0) code = (code & 15u) | ((code_of(first + j + BLOCK / 2, scale) & 15u) << 4);
        word |= code << (8 * j);
    }
    return word;
}
