// Functions that read four elements of a KV cache. Include this file once per cache, after
// lib/cache_types.glsl and lib/iq4_values.glsl. The macro CACHE(i) is word i of the cache's buffer, and the
// cache begins at word CACHE_OFF.

// Return elements 4 * quad..4 * quad + 3 of a quantized block. The block begins `h` 16-bit units after word
// `word`. A block with an odd number of units may begin in the middle of a word, so four codes may span two
// words.
vec4 CACHE_BLOCK_QUAD(uint word, uint h, uint quad) {
    const bool odd_halves = halves_of(CACHE_TYPE) % 2u == 1u;
    const bool mid = odd_halves && (h & 1u) != 0u;
    const uint first = word + (h >> 1);
    const uint head = CACHE(first);
    const vec2 pair = unpackHalf2x16(head);
    const uint code = h + head_halves(CACHE_TYPE) + 2 * (CACHE_TYPE == CACHE_Q8_0 ? quad : quad & 3u);
    const uint low = CACHE(word + (code >> 1));
    // without a branch, so that loads overlap
    const uint high = odd_halves ? CACHE(word + (code >> 1) + (code & 1u)) : low;
    const uint codes = !odd_halves || (code & 1u) == 0u ? low : (low >> 16) | (high << 16);
    const float d = mid ? pair.y : pair.x;
    if (CACHE_TYPE == CACHE_Q8_0) return d * vec4((ivec4(int(codes)) << ivec4(24, 16, 8, 0)) >> 24);
    uvec4 q = (uvec4(codes) >> (uvec4(0, 8, 16, 24) + (quad & 4u))) & 15u;
    if (has_fifth_bits(CACHE_TYPE)) {
        const uint next = CACHE(first + 1);
        const uint fifth = !odd_halves || mid ? next : (head >> 16) | (next << 16);
        q |= ((uvec4(fifth >> (4 * quad)) >> uvec4(0, 1, 2, 3)) & 1u) << 4;
    }
    if (CACHE_TYPE == CACHE_IQ4_NL) return d * vec4(iq4_values(q));
    if (has_minimum(CACHE_TYPE)) return d * vec4(q) + pair.y;
    return d * (vec4(q) - (CACHE_TYPE == CACHE_Q5_0 ? 16.0 : 8.0));
}

vec4 CACHE_QUAD(uint i) {
    if (CACHE_TYPE == CACHE_F32) {
        const uint at = CACHE_OFF + 4 * i;
        return uintBitsToFloat(uvec4(CACHE(at), CACHE(at + 1), CACHE(at + 2), CACHE(at + 3)));
    }
    if (CACHE_TYPE == CACHE_F16 || CACHE_TYPE == CACHE_BF16) {
        const uint at = CACHE_OFF + 2 * i;
        const uvec2 words = uvec2(CACHE(at), CACHE(at + 1));
        if (CACHE_TYPE == CACHE_F16) return vec4(unpackHalf2x16(words.x), unpackHalf2x16(words.y));
        return uintBitsToFloat(uvec4(words.x << 16, words.x & 0xffff0000u, words.y << 16, words.y & 0xffff0000u));
    }
    return CACHE_BLOCK_QUAD(CACHE_OFF, (i >> 3) * halves_of(CACHE_TYPE), i & 7u);
}
