// The quads (four elements) of V that a thread multiplies. Each of V_QUADS threads has one quad, or each of
// LOCAL threads has several.

const uint V_QUADS = HEAD_V / 4;
const uint V_ROUNDS = (V_QUADS + LOCAL - 1) / LOCAL; // Quads per thread.
// Two blocks of a quantized type (16 quads) end at a word boundary. If V_WORDS is set, a thread's quad has
// the same position in a pair of blocks for every key, so the position is computed once. Each condition has a
// name, because glslang folds && to a constant only if both operands are names.
const bool V_QUANTIZED = V_TYPE >= CACHE_Q8_0;
const bool V_WHOLE_PAIRS = V_QUADS % 16 == 0;
const bool V_SAME_QUADS = LOCAL % V_QUADS == 0;
const bool V_WORDS = V_QUANTIZED && V_WHOLE_PAIRS && V_SAME_QUADS;

uint v_quad0 = gl_LocalInvocationID.x % V_QUADS;

// Return the thread's quad number `round` of the head that begins at `base`.
vec4 v_quad_of(uint base, uint round) {
    if (V_WORDS) {
        const uint skipped = v_quad0 / 8 * halves_of(V_TYPE);
        return v_block_quad(v_off + base / 16 * halves_of(V_TYPE), skipped, v_quad0 % 8);
    }
    return v_quad(base + min(v_quad0 + round * LOCAL, V_QUADS - 1));
}
