// Functions that read weights as int8 codes for integer dot products. Include this file after dequant.glsl
// and q8.glsl.
//
// - A value is scale * (code - CODE_OFFSET) + low, where low is 0 unless HAS_LOW is set.
// - `Quants quants16(uint start, uint k, uint part)` returns elements k + part..k + part + 15 of a row.
//
// The argument k is a multiple of 32. The argument part is the constant 0 or 16, so the compiler unpacks bits
// that both parts share only once. GROUP elements (16 or 32) share `scale` and `low`. Codes are in
// 0..CODE_END - 1, or in -CODE_END..CODE_END - 1 if SIGNED_CODES is set. If CODES_ONLY is set, this file has
// no dot products, and a format whose codes do not fit in int8 defines NO_CODES.
#ifndef CODES_ONLY
#extension GL_EXT_spirv_intrinsics : require

// OpSDot computes the dot product of two vectors of four int8.
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int dot4(int a, int b, spirv_literal int four_bytes);

int dot16(uvec4 a, uvec4 b) {
    return dot4(int(a.x), int(b.x), 0) + dot4(int(a.y), int(b.y), 0) + dot4(int(a.z), int(b.z), 0) +
        dot4(int(a.w), int(b.w), 0);
}
#endif

struct Quants {
    uvec4 codes; // int8 codes of elements k + part + i
    float scale, low;
};

// Return 16 bytes. If BLOCK_NBYTES is a multiple of 16, so is `at`.
uvec4 u128_at(uint at) {
    const uint first = at >> 2;
    if (BLOCK_NBYTES % 16 == 0) return words4_at(first);
    const uvec4 low = uvec4(word_at(first), word_at(first + 1), word_at(first + 2), word_at(first + 3));
    if (BLOCK_NBYTES % 4 == 0) return low;
    const uint last = word_at((at + 15) >> 2), shift = 8 * (at & 3u);
    return uvec4(joined(low.x, low.y, shift), joined(low.y, low.z, shift), joined(low.z, low.w, shift),
        joined(low.w, last, shift));
}

uvec4 bytes_of(uvec4 words, uint shift, uint mask) { return (words >> shift) & (mask * 0x01010101u); }

// Expand 16 bits to bytes of 0 or 1.
uvec4 spread16(uint bits) { return (((uvec4(bits) >> uvec4(0, 4, 8, 12)) & 15u) * 0x00204081u) & 0x01010101u; }

#if defined(TYPE_IQ4_NL) || defined(TYPE_IQ4_XS) || defined(TYPE_MXFP4) || defined(TYPE_NVFP4)
uint pick(uint mask, uint a, uint b) { return (a & mask) | (b & ~mask); }

// In every nibble, swap bit i of word j and bit j of word i.
uvec4 transposed(uvec4 v) {
    const uint even = 0x55555555u, low = 0x33333333u;
    const uvec4 a = uvec4(pick(even, v.x, v.y << 1), pick(even, v.x >> 1, v.y), pick(even, v.z, v.w << 1),
        pick(even, v.z >> 1, v.w));
    return uvec4(pick(low, a.x, a.z << 2), pick(low, a.y, a.w << 2), pick(low, a.x >> 2, a.z),
        pick(low, a.y >> 2, a.w));
}

// Compute the table values (values4) of 32 codes at once by bitwise logic. Word j of `q` holds bit j of every
// code. `low` holds bits 0..3 of the values in two's complement, and `high` holds bits 4..7. Selecting each
// value from constants took three times as many instructions.
void value_bits(uvec4 q, out uvec4 low, out uvec4 high) {
#if defined(TYPE_MXFP4) || defined(TYPE_NVFP4)
    const uint both = q.x & q.z, negative = q.w & (q.x | q.y | q.z);
    const uint t = pick(q.z, q.y, negative);
    low.x = q.x ^ both;
    low.y = q.y ^ low.x ^ pick(t, q.z, q.x);
    low.w = pick(negative, pick(both, low.y, q.w), t);
    low.z = q.z ^ t ^ pick(low.w, both, negative);
    high = uvec4(negative);
#else
    high.w = ~q.w;
    const uint a = q.x | q.y | high.w;
    const uint t = pick(a, high.w, q.z);
    high.z = q.z & a;
    high.y = pick(q.x | high.w, q.y, t);
    const uint s = (q.z & high.y) | high.w;
    high.x = q.x ^ a ^ s;
    const uint u = q.y ^ a ^ t;
    const uint v = pick(q.x, u, high.z);
    low.y = pick(s, v, high.y);
    low.w = q.x ^ pick(v, q.z, q.y);
    low.z = high.y ^ v ^ pick(v, high.x, high.z);
    low.x = ~(low.z ^ pick(q.w, u, low.w));
#endif
}

// Look up the nibbles at bit `shift` (0 or 4) of each byte of `words`.
uvec4 looked_up(uvec4 words, uint shift) {
    uvec4 low, high;
    value_bits(transposed(words), low, high);
    low = transposed(low) >> shift;
    high = transposed(high);
    if (shift == 0) high <<= 4;
    return (low & 0x0F0F0F0Fu) | (high & 0xF0F0F0F0u);
}
#endif

#if defined(TYPE_Q4_0)
const uint GROUP = 32;
const int CODE_OFFSET = 8;
const int CODE_END = 16;

Quants quants(uint b, uint k, uint part) { return Quants(bytes_of(u128_at(b + 2), part / 4, 15u), f16_at(b), 0.0); }

#elif defined(TYPE_Q4_1)
const uint GROUP = 32;
const int CODE_OFFSET = 0;
const int CODE_END = 16;
#define HAS_LOW

Quants quants(uint b, uint k, uint part) {
    const vec2 dm = unpackHalf2x16(u32_at(b));
    return Quants(bytes_of(u128_at(b + 4), part / 4, 15u), dm.x, dm.y);
}

#elif defined(TYPE_Q5_0) || defined(TYPE_Q5_1)
const uint GROUP = 32;
const int CODE_END = 32;
#ifdef TYPE_Q5_0
const int CODE_OFFSET = 16;
#else
const int CODE_OFFSET = 0;
#define HAS_LOW
#endif

Quants quants(uint b, uint k, uint part) {
    const uvec4 high = spread16(u32_at(b + HEAD) >> part) << 4;
    const uvec4 codes = bytes_of(u128_at(b + HEAD + 4), part / 4, 15u) | high;
#ifdef TYPE_Q5_0
    return Quants(codes, f16_at(b), 0.0);
#else
    const vec2 dm = unpackHalf2x16(u32_at(b));
    return Quants(codes, dm.x, dm.y);
#endif
}

#elif defined(TYPE_Q8_0)
const uint GROUP = 32;
const int CODE_OFFSET = 0;
const int CODE_END = 128;
#define SIGNED_CODES

Quants quants(uint b, uint k, uint part) { return Quants(u128_at(b + 2 + part), f16_at(b), 0.0); }

#elif defined(TYPE_MXFP4)
const uint GROUP = 32;
const int CODE_OFFSET = 0;
const int CODE_END = 128;
#define SIGNED_CODES

Quants quants(uint b, uint k, uint part) { return Quants(looked_up(u128_at(b + 1), part / 4), scale_of(b, k), 0.0); }

#elif defined(TYPE_NVFP4)
const uint GROUP = 16;
const int CODE_OFFSET = 0;
const int CODE_END = 128;
#define SIGNED_CODES

Quants quants(uint b, uint k, uint part) {
    const uint at = (b + 4 + (k + part) / 16 * 8) >> 2;
    const uvec2 words = uvec2(word_at(at), word_at(at + 1));
    return Quants(looked_up(uvec4(words, words >> 4), 0), scale_of(b, k + part), 0.0);
}

#elif defined(TYPE_Q1_0)
const uint GROUP = 32;
const int CODE_OFFSET = 1;
const int CODE_END = 4;

Quants quants(uint b, uint k, uint part) {
    return Quants(spread16(u16_at(b + 2 + (k + part) / 8)) << 1, f16_at(b), 0.0);
}

#elif defined(TYPE_Q2_0)
const uint GROUP = 32;
const int CODE_OFFSET = 1;
const int CODE_END = 4;

Quants quants(uint b, uint k, uint part) {
    const uvec4 four = (uvec4(u32_at(b + 2 + (k + part) / 4)) >> uvec4(0, 8, 16, 24)) & 0xFFu;
    const uvec4 two = (four | (four << 12)) & 0x000F000Fu;
    return Quants((two | (two << 6)) & 0x03030303u, f16_at(b), 0.0);
}

#elif defined(TYPE_IQ4_NL)
const uint GROUP = 32;
const int CODE_OFFSET = 0;
const int CODE_END = 128;
#define SIGNED_CODES

Quants quants(uint b, uint k, uint part) { return Quants(looked_up(u128_at(b + 2), part / 4), f16_at(b), 0.0); }

#elif defined(TYPE_IQ4_XS)
const uint GROUP = 32;
const int CODE_OFFSET = 0;
const int CODE_END = 128;
#define SIGNED_CODES

Quants quants(uint b, uint k, uint part) {
    return Quants(looked_up(u128_at(b + 8 + k / 32 * 16), part / 4), scale_of(b, k), 0.0);
}

#elif defined(TYPE_Q2_K)
const uint GROUP = 16;
const int CODE_OFFSET = 0;
const int CODE_END = 4;
#define HAS_LOW

Quants quants(uint b, uint k, uint part) {
    const vec2 s = scale_min(b, k + part);
    return Quants(bytes_of(u128_at(b + 16 + k / 128 * 32 + part), k / 32 % 4 * 2, 3u), s.x, -s.y);
}

#elif defined(TYPE_Q3_K)
const uint GROUP = 16;
const int CODE_OFFSET = 4;
const int CODE_END = 8;

Quants quants(uint b, uint k, uint part) {
    const uvec4 h = bytes_of(u128_at(b + part), k / 32, 1u);
    const uvec4 q = bytes_of(u128_at(b + 32 + k / 128 * 32 + part), k / 32 % 4 * 2, 3u);
    return Quants(q | (h << 2), scale_of(b, k + part), 0.0);
}

#elif defined(TYPE_Q4_K) || defined(TYPE_Q5_K)
const uint GROUP = 32;
const int CODE_OFFSET = 0;
const int CODE_END = 32;
#define HAS_LOW

Quants quants(uint b, uint k, uint part) {
    uvec4 codes = bytes_of(u128_at(b + CODES + k / 64 * 32 + part), k / 32 % 2 * 4, 15u);
#ifdef TYPE_Q5_K
    codes |= bytes_of(u128_at(b + 16 + part), k / 32, 1u) << 4;
#endif
    const vec2 s = scale_min(b, k);
    return Quants(codes, s.x, -s.y);
}

#elif defined(TYPE_Q6_K)
const uint GROUP = 16;
const int CODE_OFFSET = 32;
const int CODE_END = 64;

Quants quants(uint b, uint k, uint part) {
    const uint i = k / 128;
    const uvec4 q = bytes_of(u128_at(b + i * 64 + k % 64 + part), k / 64 % 2 * 4, 15u);
    const uvec4 h = bytes_of(u128_at(b + 128 + i * 32 + part), k / 32 % 4 * 2, 3u);
    return Quants(q | (h << 4), scale_of(b, k + part), 0.0);
}

#elif defined(CODES_ONLY)
#define NO_CODES
#else
#error unknown TYPE has no quants in quants.glsl
#endif

#ifndef NO_CODES
Quants quants16(uint start, uint k, uint part) {
    return quants(start + k / ROW_UNIT * BLOCK_NBYTES, k % ROW_UNIT, part);
}
#endif

#ifndef CODES_ONLY

// Return code - CODE_OFFSET as int8. The sum code + 128 - CODE_OFFSET fits in a byte.
uvec4 signed_codes(uvec4 codes) {
    return CODE_OFFSET == 0 ? codes : (codes + uint(128 - CODE_OFFSET) * 0x01010101u) ^ 0x80808080u;
}

struct Group {
    uvec4 codes[GROUP / 16];
    float scale, low;
};

Group group_at(uint start, uint k) {
    Group group;
    const Quants first = quants16(start, GROUP == 32 ? k : k & ~31u, GROUP == 32 ? 0 : k & 16u);
    if (GROUP == 32) group.codes[GROUP / 16 - 1] = quants16(start, k, 16).codes;
    group.codes[0] = first.codes;
    group.scale = first.scale;
    group.low = first.low;
    return group;
}

// Return the sum of x over the group of element k, from the two sums of the block that contains it.
int group_sum(uint x_sums, uint k) { return GROUP == 32 ? q8_sum32(x_sums) : q8_sum16(x_sums, k); }

// Return the dot product without the scale of x. `x_sum` is the sum of `x_codes`.
float product(Group group, uvec4 x_codes[GROUP / 16], int x_sum) {
    int dots = dot16(group.codes[0], x_codes[0]);
    if (GROUP == 32) dots += dot16(group.codes[GROUP / 16 - 1], x_codes[GROUP / 16 - 1]);
    float value = group.scale * float(dots - CODE_OFFSET * x_sum);
#ifdef HAS_LOW
    value += group.low * float(x_sum);
#endif
    return value;
}
#endif
