// Formats of one and two bits; part of dequant.glsl. Elements of the ternary formats TQ1_0 and TQ2_0 are -d, 0
// or d.

#if defined(TYPE_TQ1_0)
// A block is u8 q[52], f16 d. An element is d * (digit - 1). A byte stores five elements, or four in the last
// four bytes, as the base-3 digits of q / 256. Digit n is floor(3 * (3^n q mod 256) / 256). For k < 160,
// element k is digit k / 32 of byte k % 32. For 160 <= k < 240, it is digit k / 16 - 10 of byte 32 + k % 16.
// For k >= 240, it is digit k / 4 - 60 of byte 48 + k % 4.
#define ROW_UNIT 256u
#define BLOCK_NBYTES 54u

vec4 decode4(uint b, uint k8, uint part) {
    const uint k = k8 + part;
    const uvec2 place = k < 160 ? uvec2(k % 32, k / 32) : k < 240 ? uvec2(32 + k % 16, (k - 160) / 16)
        : uvec2(48, (k - 240) / 4);
    const uint power = place.y == 4 ? 81u : (0x1B090301u >> (8 * place.y)) & 0xFFu; // 3^n
    const uvec4 fraction = (codes4(u32_at(b + place.x), 0, 0xFFu) * power) & 0xFFu;
    return f16_at(b + 52) * (vec4((fraction * 3u) >> 8) - 1.0);
}

#elif defined(TYPE_TQ2_0)
// A block is u8 q[64], f16 d. The code of element 128 i + 32 j + l is bits 2j and 2j + 1 of byte 32 i + l. An
// element is d * (q - 1).
#define ROW_UNIT 256u
#define BLOCK_NBYTES 66u

vec4 decode4(uint b, uint k, uint part) {
    const uvec4 q = codes4(u32_at(b + k / 128 * 32 + k % 32 + part), k / 32 % 4 * 2, 3u);
    return f16_at(b + 64) * (vec4(q) - 1.0);
}

#elif defined(TYPE_Q1_0)
// A block is f16 d, u8 q[16]. Element k is d if bit k of q is set, else -d.
#define ROW_UNIT 128u
#define BLOCK_NBYTES 18u

vec4 decode4(uint b, uint k, uint part) {
    const uvec4 q = (uvec4(u8_at(b + 2 + k / 8) >> part) >> uvec4(0, 1, 2, 3)) & 1u;
    return f16_at(b) * (2.0 * vec4(q) - 1.0);
}

#elif defined(TYPE_Q2_0)
// A block is f16 d, u8 q[16]. The code of element k is bits 2k and 2k + 1 of q. An element is d * (code - 1).
#define ROW_UNIT 64u
#define BLOCK_NBYTES 18u

vec4 decode4(uint b, uint k, uint part) {
    const uvec4 q = (uvec4(u16_at(b + 2 + k / 4) >> (2 * part)) >> uvec4(0, 2, 4, 6)) & 3u;
    return f16_at(b) * (vec4(q) - 1.0);
}
#endif
