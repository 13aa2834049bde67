// The quads of V that a thread multiplies, in attn_decode, attn_chosen and attn_prefill. The dimensions of V are
// dealt to V_QUADS threads, or several quads to each of LOCAL threads.

const uint V_QUADS = HEAD_V / 4;
const uint V_ROUNDS = (V_QUADS + LOCAL - 1) / LOCAL; // quads per thread
// Two blocks of a quantized type (16 quads) are whole words. With V_WORDS a thread's quad is at the same place of
// such a pair for every key: computed once. (Conditions have names: glslang makes a constant of && between names
// only.)
const bool V_QUANTIZED = V_TYPE >= CACHE_Q8_0;
const bool V_WHOLE_PAIRS = V_QUADS % 16 == 0;
const bool V_SAME_QUADS = LOCAL % V_QUADS == 0;
const bool V_WORDS = V_QUANTIZED && V_WHOLE_PAIRS && V_SAME_QUADS;

uint v_quad0 = gl_LocalInvocationID.x % V_QUADS;

// Of the head whose quads begin at `base`.
vec4 v_quad_of(uint base, uint round) {
    if (V_WORDS) {
        const uint skipped = v_quad0 / 8 * halves_of(V_TYPE);
        return v_block_quad(v_off + base / 16 * halves_of(V_TYPE), skipped, v_quad0 % 8);
    }
    return v_quad(base + min(v_quad0 + round * LOCAL, V_QUADS - 1));
}
