// Return the values of four codes of IQ4_NL and IQ4_XS: -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38,
// 53 69 89 113.
ivec4 iq4_values(uvec4 q) {
    const uvec4 low = mix(uvec4(0xBFAD9881u), uvec4(0xF6EADDCFu), notEqual(q & 4u, uvec4(0)));
    const uvec4 high = mix(uvec4(0x26190D01u), uvec4(0x71594535u), notEqual(q & 4u, uvec4(0)));
    const uvec4 word = mix(low, high, notEqual(q & 8u, uvec4(0)));
    return ivec4(word << (24 - 8 * (q & 3u))) >> 24;
}
