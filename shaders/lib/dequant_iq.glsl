// I-quants; part of dequant.glsl. IQ4: elements are 4-bit codes of 16 unevenly spaced values. Others: 8
// elements are stored as one codebook entry of 8 values, or two of 4, and 8 signs (IQ1: only the sign of a
// shift). Blocks have 256 elements in 8 groups of 32 (IQ4_NL: 32 elements).

#if defined(TYPE_IQ4_NL) || defined(TYPE_IQ4_XS)
// The values as bytes: -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113.
ivec4 values4(uvec4 q) {
    const uvec4 low = mix(uvec4(0xBFAD9881u), uvec4(0xF6EADDCFu), notEqual(q & 4u, uvec4(0)));
    const uvec4 high = mix(uvec4(0x26190D01u), uvec4(0x71594535u), notEqual(q & 4u, uvec4(0)));
    const uvec4 word = mix(low, high, notEqual(q & 8u, uvec4(0)));
    return ivec4(word << (24 - 8 * (q & 3u))) >> 24;
}
#endif

#if defined(TYPE_IQ1_S) || defined(TYPE_IQ1_M) || defined(TYPE_IQ2_XXS) || defined(TYPE_IQ2_XS) || \
    defined(TYPE_IQ2_S) || defined(TYPE_IQ3_XXS) || defined(TYPE_IQ3_S)
#define ROW_UNIT 256u

// from codebooks.py, two entries per word
layout(set = 1, binding = 0) readonly buffer Codebook { uint codebook[]; };

uint grid_entry(uint i) { return (codebook[i >> 1] >> (16 * (i & 1u))) & 0xFFFFu; }

// Return the four 2-bit codes from element `part` on.
uvec4 pairs4(uint entry, uint part) {
    const uint e = entry >> (2 * part);
    return uvec4(e, e >> 2, e >> 4, e >> 6) & 3u;
}

// IQ2: codes 0, 1, 2 stand for 8, 25, 43.
vec4 iq2_values(uint entry, uint part) {
    const uvec4 code = pairs4(entry, part);
    return vec4(8u + 17u * code + (code >> 1));
}

vec4 signed4(vec4 value, uint signs, uint part) {
    const uvec4 bits = (uvec4(signs >> part) >> uvec4(0, 1, 2, 3)) & 1u;
    return mix(value, -value, notEqual(bits, uvec4(0)));
}

// The eighth sign is a parity bit: it makes the number of minus signs even.
uint eight_signs(uint seven) { return seven | (uint(bitCount(seven)) & 1u) << 7; }
#endif

#if defined(TYPE_IQ4_NL)
// a block of 32: f16 d; nibbles q                       d * values[q]
#define ROW_UNIT 32u
#define BLOCK_NBYTES 18u

vec4 decode4(uint b, uint k, uint part) { return f16_at(b) * vec4(values4(nibbles4(b + 2, k, part))); }

#elif defined(TYPE_IQ4_XS)
// f16 d; u16 h, bits 2g and 2g + 1 are the high bits of group g's scale; u8 s[4], nibble g is its low bits;
// nibbles q[8]                                          d * (scale - 32) * values[q]
#define ROW_UNIT 256u
#define BLOCK_NBYTES 136u

float scale_of(uint b, uint k) {
    const uint g = k / 32;
    const uint head = u32_at(b);
    const uint scale = ((u32_at(b + 4) >> (4 * g)) & 15u) | (((head >> (16 + 2 * g)) & 3u) << 4);
    return unpackHalf2x16(head).x * (float(scale) - 32.0);
}

vec4 decode4(uint b, uint k, uint part) {
    return scale_of(b, k) * vec4(values4(nibbles4(b + 8 + k / 32 * 16, k, part)));
}

#elif defined(TYPE_IQ2_XXS)
// f16 d; per group u8 entry[4]; u32: four times 7 signs, then a scale of 4 bits   d / 4 * (scale + 1/2) * +-value
#define BLOCK_NBYTES 66u

vec4 decode4(uint b, uint k, uint part) {
    const uint g = b + 2 + k / 32 * 8;
    const uint tail = u32_at(g + 4);
    const uint signs = eight_signs((tail >> (k / 8 % 4 * 7)) & 127u);
    const float d = f16_at(b) * (0.5 + float(tail >> 28)) * 0.25;
    return d * signed4(iq2_values(grid_entry(u8_at(g + k / 8 % 4)), part), signs, part);
}

#elif defined(TYPE_IQ2_XS)
// f16 d; u16 q[32], an entry in the low 9 bits, 7 signs above; u8 s[8], two scales each, of 16 elements,
// the first in the low nibble                           d / 4 * (scale + 1/2) * +-value
#define BLOCK_NBYTES 74u

vec4 decode4(uint b, uint k, uint part) {
    const uint q = u16_at(b + 2 + k / 8 * 2);
    const uint scale = (u8_at(b + 66 + k / 32) >> (k / 16 % 2 * 4)) & 15u;
    const float d = f16_at(b) * (0.5 + float(scale)) * 0.25;
    return d * signed4(iq2_values(grid_entry(q & 511u), part), eight_signs(q >> 9), part);
}

#elif defined(TYPE_IQ2_S)
// f16 d; u8 q[32], the low 8 bits of entries; u8 signs[32]; u8 h[8], their high 2 bits, four entries per
// byte; u8 s[8] as in IQ2_XS                            d / 4 * (scale + 1/2) * +-value
#define BLOCK_NBYTES 82u

vec4 decode4(uint b, uint k, uint part) {
    const uint high = (u8_at(b + 66 + k / 32) >> (k / 8 % 4 * 2)) & 3u;
    const uint scale = (u8_at(b + 74 + k / 32) >> (k / 16 % 2 * 4)) & 15u;
    const float d = f16_at(b) * (0.5 + float(scale)) * 0.25;
    const vec4 value = iq2_values(grid_entry(u8_at(b + 2 + k / 8) | (high << 8)), part);
    return d * signed4(value, u8_at(b + 34 + k / 8), part);
}

#elif defined(TYPE_IQ3_XXS)
// f16 d; u8 entry[64]; per group u32: four times 7 signs, then a scale of 4 bits  d / 2 * (scale + 1/2) * +-value
// codes 0..7 stand for 4, 12, 20, ... 52, 62
#define BLOCK_NBYTES 98u

vec4 decode4(uint b, uint k, uint part) {
    const uint tail = u32_at(b + 66 + k / 32 * 4);
    const uint entry = grid_entry(u8_at(b + 2 + (k + part) / 4));
    const uvec4 code = uvec4(entry, entry >> 4, entry >> 8, entry >> 12) & 7u;
    const vec4 value = vec4(4u + 8u * code + 2u * (code / 7u));
    const float d = f16_at(b) * (0.5 + float(tail >> 28)) * 0.5;
    return d * signed4(value, eight_signs((tail >> (k / 8 % 4 * 7)) & 127u), part);
}

#elif defined(TYPE_IQ3_S)
// f16 d; u8 q[64], the low 8 bits of entries; u8 h[8], their high bit, eight entries per byte; u8 signs[32];
// u8 s[4], a nibble per group                           d * (2 scale + 1) * +-(2 code + 1)
#define BLOCK_NBYTES 110u

vec4 decode4(uint b, uint k, uint part) {
    const uint high = (u8_at(b + 66 + k / 32) >> ((k + part) / 4 % 8)) & 1u;
    const uint entry = grid_entry(u8_at(b + 2 + (k + part) / 4) | (high << 8));
    const uvec4 code = uvec4(entry, entry >> 4, entry >> 8, entry >> 12) & 7u;
    const uint scale = (u8_at(b + 106 + k / 64) >> (k / 32 % 2 * 4)) & 15u;
    return f16_at(b) * float(2 * scale + 1) * signed4(vec4(2u * code + 1u), u8_at(b + 74 + k / 8), part);
}

#elif defined(TYPE_IQ1_S)
// f16 d; u8 q[32], the low 8 bits of entries; per group u16 h: the high 3 bits of four entries, a scale of
// 3 bits and the sign of a shift by 1/8                 d * (2 scale + 1) * (code - 1 +- 1/8)
#define BLOCK_NBYTES 50u

vec4 decode4(uint b, uint k, uint part) {
    const uint h = u16_at(b + 34 + k / 32 * 2);
    const uint high = (h >> (k / 8 % 4 * 3)) & 7u;
    const vec4 code = vec4(pairs4(grid_entry(u8_at(b + 2 + k / 8) | (high << 8)), part));
    const float d = f16_at(b) * float(2 * ((h >> 12) & 7u) + 1);
    return d * (code + (h >= 0x8000u ? -1.125 : -0.875));
}

#elif defined(TYPE_IQ1_M)
// u8 q[32], the low 8 bits of entries; u8 h[16], a nibble per entry: its high 3 bits and the sign of a shift
// by 1/8; u16 s[4]: four scales of 3 bits, of 16 elements each, then 4 bits of f16 d
//                                                       d * (2 scale + 1) * (code - 1 +- 1/8)
#define BLOCK_NBYTES 56u

vec4 decode4(uint b, uint k, uint part) {
    const uvec2 s = uvec2(u32_at(b + 48), u32_at(b + 52)); // s[0] and s[2] are in the low 16 bits
    const uvec2 two = ((s >> 12) & 15u) | ((s >> 24) & 0xF0u); // each has one byte of d
    const float d = unpackHalf2x16(two.x | (two.y << 8)).x;
    const uint scales = (k < 128 ? s.x : s.y) >> (k / 64 % 2 * 16);
    const uint scale = (scales >> (k / 16 % 4 * 3)) & 7u;
    const uint h = u8_at(b + 32 + k / 16) >> (k / 8 % 2 * 4);
    const vec4 code = vec4(pairs4(grid_entry(u8_at(b + k / 8) | ((h & 7u) << 8)), part));
    return d * float(2 * scale + 1) * (code + ((h & 8u) != 0 ? -1.125 : -0.875));
}
#endif
