// Blocks of 32 elements with one scale, and NVFP4; part of dequant.glsl. Below, `nibbles` are 16 bytes. The low
// nibble of byte j is element j, and the high nibble is element j + 16.

uvec4 nibbles4(uint at, uint k, uint part) { return codes4(u32_at(at + (k & 15u) + part), (k & 16u) >> 2, 15u); }

#if defined(TYPE_MXFP4) || defined(TYPE_NVFP4)
// A nibble has a sign bit and 3 bits that select 0, 1, 2, 3, 4, 6, 8 or 12. These are the numbers of E2M1
// times 2.
ivec4 values4(uvec4 q) {
    const ivec4 magnitude = ivec4((uvec4(0xC8643210u) >> (4 * (q & 7u))) & 15u);
    return mix(magnitude, -magnitude, notEqual(q & 8u, uvec4(0)));
}
#endif

#if defined(TYPE_Q4_0)
// A block is f16 d, nibbles q. An element is d * (q - 8).
#define ROW_UNIT 32u
#define BLOCK_NBYTES 18u

vec4 decode4(uint b, uint k, uint part) { return f16_at(b) * (vec4(nibbles4(b + 2, k, part)) - 8.0); }

#elif defined(TYPE_Q4_1)
// A block is f16 d, f16 m, nibbles q. An element is d * q + m.
#define ROW_UNIT 32u
#define BLOCK_NBYTES 20u

vec4 decode4(uint b, uint k, uint part) {
    const vec2 dm = unpackHalf2x16(u32_at(b));
    return dm.x * vec4(nibbles4(b + 4, k, part)) + dm.y;
}

#elif defined(TYPE_Q5_0) || defined(TYPE_Q5_1)
// A block of Q5_0 is f16 d, u32 h, nibbles q. An element is d * (q + 16 * bit k of h - 16).
// A block of Q5_1 is f16 d, f16 m, u32 h, nibbles q. An element is d * (q + 16 * bit k of h) + m.
#define ROW_UNIT 32u
#ifdef TYPE_Q5_0
#define BLOCK_NBYTES 22u
const uint HEAD = 2;
#else
#define BLOCK_NBYTES 24u
const uint HEAD = 4;
#endif

vec4 decode4(uint b, uint k, uint part) {
    const uvec4 high = (uvec4(u32_at(b + HEAD) >> (k + part)) >> uvec4(0, 1, 2, 3)) & 1u;
    const vec4 q = vec4(nibbles4(b + HEAD + 4, k, part) | (high << 4));
#ifdef TYPE_Q5_0
    return f16_at(b) * (q - 16.0);
#else
    const vec2 dm = unpackHalf2x16(u32_at(b));
    return dm.x * q + dm.y;
#endif
}

#elif defined(TYPE_Q8_0)
// A block is f16 d, int8 q[32]. An element is d * q.
#define ROW_UNIT 32u
#define BLOCK_NBYTES 34u

vec4 decode4(uint b, uint k, uint part) {
    const int q = int(u32_at(b + 2 + k + part));
    return f16_at(b) * vec4(ivec4(q << 24, q << 16, q << 8, q) >> 24);
}

#elif defined(TYPE_MXFP4)
// A block is u8 e, nibbles q. An element is 2^(e - 128) * values4(nibble).
#define ROW_UNIT 32u
#define BLOCK_NBYTES 17u

float scale_of(uint b, uint k) {
    const uint e = u8_at(b);
    return uintBitsToFloat(e < 2 ? 0x00200000u << e : (e - 1) << 23); // e < 2: subnormal
}

vec4 decode4(uint b, uint k, uint part) { return scale_of(b, k) * vec4(values4(nibbles4(b + 1, k, part))); }

#elif defined(TYPE_NVFP4)
// A block is u8 s[4], and 8 bytes of nibbles for each of four groups of 16 elements. The low nibbles are the
// group's elements 0..7, the high nibbles its elements 8..15. An element is |s| / 2 * values4(nibble), with the
// group's E4M3 number s. The NaN 0x7F means 0.
#define ROW_UNIT 64u
#define BLOCK_NBYTES 36u

float scale_of(uint b, uint k) {
    const uint s = u8_at(b + k / 16), e4m3 = s & 0x7Fu;
    const float normal = uintBitsToFloat((e4m3 << 20) + (119u << 23));
    return s == 0x7Fu ? 0.0 : e4m3 < 8 ? float(e4m3) * (1.0 / 1024.0) : normal;
}

vec4 decode4(uint b, uint k, uint part) {
    const uvec4 q = codes4(u32_at(b + 4 + k / 16 * 8 + part), (k & 8u) >> 1, 15u);
    return scale_of(b, k) * vec4(values4(q));
}
#endif
