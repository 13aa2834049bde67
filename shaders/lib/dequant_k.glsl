// K-quants; part of dequant.glsl. A block has 256 elements in groups of 16 or 32. The groups' scales are
// codes, too. Below, the indices i, j and l of element k of a block are given by k = 128 i + 32 j + l.

#if defined(TYPE_Q2_K)
// A block is u8 s[16], u8 q[64], f16 d, f16 m. Each s holds the scale (low nibble) and min (high nibble) of
// 16 elements. The code q is bits 2j and 2j + 1 of byte 32 i + l. An element is d * scale * q - m * min.
#define ROW_UNIT 256u
#define BLOCK_NBYTES 84u

vec2 scale_min(uint b, uint k) {
    const uint s = u8_at(b + k / 16);
    return unpackHalf2x16(u32_at(b + 80)) * vec2(s & 15u, s >> 4);
}

vec4 decode4(uint b, uint k, uint part) {
    const vec4 q = vec4(codes4(u32_at(b + 16 + k / 128 * 32 + k % 32 + part), k / 32 % 4 * 2, 3u));
    const vec2 s = scale_min(b, k);
    return s.x * q - s.y;
}

#elif defined(TYPE_Q3_K)
// A block is u8 h[32], u8 q[64], u8 s[12], f16 d. The code h is bit k / 32 of byte l, and q is stored as in
// Q2_K. The array s holds 16 codes of 6 bits: the low 4 bits in the nibbles of bytes 0..7, the high 2 bits in
// bytes 8..11. An element is d * (code - 32) * (q + 4 h - 4).
#define ROW_UNIT 256u
#define BLOCK_NBYTES 110u

float scale_of(uint b, uint k) {
    const uint g = k / 16;
    const uint low = (u8_at(b + 96 + g % 8) >> (g / 8 * 4)) & 15u;
    const uint high = (u8_at(b + 104 + g % 4) >> (g / 4 * 2)) & 3u;
    return f16_at(b + 108) * (float(low | (high << 4)) - 32.0);
}

vec4 decode4(uint b, uint k, uint part) {
    const uvec4 h = codes4(u32_at(b + k % 32 + part), k / 32, 1u);
    const uvec4 q = codes4(u32_at(b + 32 + k / 128 * 32 + k % 32 + part), k / 32 % 4 * 2, 3u);
    return scale_of(b, k) * (vec4(q | (h << 2)) - 4.0);
}

#elif defined(TYPE_Q4_K) || defined(TYPE_Q5_K)
// A block of Q4_K is f16 d, f16 m, u8 s[12], u8 q[128]. The code of element k is in byte 32 (k / 64) + l of
// q, in the low nibble if k / 32 is even. A block of Q5_K has u8 h[32] before q. Bit k / 32 of byte l is the
// code's fifth bit. The array s holds a 6-bit scale and a 6-bit min for each group k / 32. For groups 0..3,
// scales are the low 6 bits of bytes 0..3, and mins are the low 6 bits of bytes 4..7. For groups 4..7, the
// nibbles of bytes 8..11 are the low 4 bits of scales (low nibble) and mins (high nibble). The top 2 bits of
// bytes 0..3 (scales) and 4..7 (mins) are the high 2 bits. An element is d * scale * q - m * min.
#define ROW_UNIT 256u
#ifdef TYPE_Q4_K
#define BLOCK_NBYTES 144u
const uint CODES = 16;
#else
#define BLOCK_NBYTES 176u
const uint CODES = 48;
#endif

vec2 scale_min(uint b, uint k) {
    const uint g = k / 32;
    const uvec4 head = words4_at(b / 4);
    const uvec3 s = head.yzw >> (g % 4 * 8);
    const uvec2 first = s.xy & 63u; // groups 0..3
    const uvec2 last = (uvec2(s.z, s.z >> 4) & 15u) | ((s.xy >> 2) & 0x30u); // groups 4..7
    return unpackHalf2x16(head.x) * vec2(g < 4 ? first : last);
}

vec4 decode4(uint b, uint k, uint part) {
    const uint g = k / 32;
    uvec4 q = codes4(u32_at(b + CODES + k / 64 * 32 + k % 32 + part), g % 2 * 4, 15u);
#ifdef TYPE_Q5_K
    q |= codes4(u32_at(b + 16 + k % 32 + part), g, 1u) << 4;
#endif
    const vec2 s = scale_min(b, k);
    return s.x * vec4(q) - s.y;
}

#elif defined(TYPE_Q6_K)
// A block is u8 q[128], u8 h[64], int8 scale[16], f16 d. The code q of element k is in byte 64 i + k % 64, in
// the low nibble if k % 128 < 64. The code h is bits 2j and 2j + 1 of byte 32 i + l. An element is
// d * scale * (q + 16 h - 32).
#define ROW_UNIT 256u
#define BLOCK_NBYTES 210u

float scale_of(uint b, uint k) { return f16_at(b + 208) * float(int(u8_at(b + 192 + k / 16) << 24) >> 24); }

vec4 decode4(uint b, uint k, uint part) {
    const uint i = k / 128;
    const uvec4 q = codes4(u32_at(b + i * 64 + k % 64 + part), k / 64 % 2 * 4, 15u);
    const uvec4 h = codes4(u32_at(b + 128 + i * 32 + k % 32 + part), k / 32 % 4 * 2, 3u);
    return scale_of(b, k) * (vec4(q | (h << 4)) - 32.0);
}
#endif
