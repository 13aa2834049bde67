// I-quants of four bits: codes that stand for 16 unevenly spaced values; part of dequant.glsl.

#if defined(TYPE_IQ4_NL) || defined(TYPE_IQ4_XS)
// The values as bytes: -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113.
vec4 values4(uvec4 q) {
    const uvec4 low = mix(uvec4(0xBFAD9881u), uvec4(0xF6EADDCFu), notEqual(q & 4u, uvec4(0)));
    const uvec4 high = mix(uvec4(0x26190D01u), uvec4(0x71594535u), notEqual(q & 4u, uvec4(0)));
    const uvec4 word = mix(low, high, notEqual(q & 8u, uvec4(0)));
    return vec4(ivec4(word << (24 - 8 * (q & 3u))) >> 24);
}
#endif

#if defined(TYPE_IQ4_NL)
// a block of 32: half d; nibbles q                      d * values[q]
const uint ROW_UNIT = 32;
const uint BLOCK_NBYTES = 18;

vec4 decode4(uint b, uint k) { return f16_at(b) * values4(nibbles4(b + 2, k)); }

#elif defined(TYPE_IQ4_XS)
// a block of 256 in groups of 32: half d; u16 h, bits 2g the high bits of a scale; u8 s[4], a nibble each its low
// ones; nibbles q[8]                                    d * (scale - 32) * values[q]
const uint ROW_UNIT = 256;
const uint BLOCK_NBYTES = 136;

vec4 decode4(uint b, uint k) {
    const uint g = k / 32;
    const uint head = u32_at(b);
    const uint scale = ((u32_at(b + 4) >> (4 * g)) & 15u) | (((head >> (16 + 2 * g)) & 3u) << 4);
    return unpackHalf2x16(head).x * (float(scale) - 32.0) * values4(nibbles4(b + 8 + 16 * g, k % 32));
}
#endif
