// Pieces of eight elements of K and V, which threads copy from the cache to the tiles of
// lib/unit_attention.glsl. The including file also declares the caches as `uint k1[]`, `uvec4 k4[]`,
// `uint v1[]`, `uvec4 v4[]`, without readonly. It fills k_held and v_held with the pieces of a chunk of a block.

const uint K_PIECES = HEAD_K / 8;
const uint V_PIECES = HEAD_V / 8;
const uint K_COLUMNS = K_PIECES / K_CHUNKS; // pieces of a key's chunk
const uint V_COLUMNS = V_PIECES / V_CHUNKS;
const uint K_ROUNDS = (CELL_BLOCK * K_COLUMNS + LOCAL - 1) / LOCAL; // Per invocation.
const uint V_KEYS = CELL_BLOCK / 4; // groups of four keys
const uint V_ROUNDS = (V_KEYS * V_COLUMNS + LOCAL - 1) / LOCAL; // Per invocation.
// K_EVEN is set if all pieces of an invocation are at the same position within their keys.
const bool K_EVEN = LOCAL % K_COLUMNS == 0;
// Q8_0 is converted to F16 when it is stored in the tile. Two blocks of Q8_0 have 17 words. Only the codes of
// the second block begin at a word boundary.
const bool K_IS_Q8 = K_TYPE == CACHE_Q8_0;
const bool V_IS_Q8 = V_TYPE == CACHE_Q8_0;
const bool K_WHOLE_PAIRS = HEAD_K % 64 == 0;
const bool V_WHOLE_PAIRS = HEAD_V % 64 == 0;
const bool K_CODES = K_IS_Q8 && K_WHOLE_PAIRS;
const bool V_CODES = V_IS_Q8 && V_WHOLE_PAIRS;

uint k_key(uint j) {
    return K_EVEN ? gl_LocalInvocationID.x / K_COLUMNS + j * (LOCAL / K_COLUMNS) : (gl_LocalInvocationID.x + j * LOCAL) / K_COLUMNS;
}

uint k_column(uint j) { return (K_EVEN ? gl_LocalInvocationID.x : gl_LocalInvocationID.x + j * LOCAL) % K_COLUMNS; }

uint v_column(uint j) { return (gl_LocalInvocationID.x + j * LOCAL) / V_KEYS; }

// Return whether a piece is in the second block of a pair.
bool is_second(uint piece) { return (piece / 4) % 2 == 1; }

// Return where a piece begins. The unit is a word if the piece has eight codes, which are in three words, and
// 16 bytes if it is F16.
uint place(uint i, bool codes) { return codes ? i / 8 * Q8_0_HALVES + i / 4 % 2 * (Q8_0_HALVES / 2) + 2 * (i % 4) : i; }

// Return eight F16 values. If K_CODES is set, return three words of codes and the word of their scale.
uvec4 k_piece(uint at, uint column) {
    if (K_TYPE == CACHE_F16) return k4[k_off / 4 + at];
    if (!K_CODES) return uvec4(words_of(k_halves(2 * at)), words_of(k_halves(2 * at + 1)));
    const uint word = k_off + at;
    return uvec4(k1[word], k1[word + 1], k1[word + 2], k1[word - 2 * (column % 4)]);
}

uvec4 v_piece(uint at, uint column) {
    if (V_TYPE == CACHE_F16) return v4[v_off / 4 + at];
    if (!V_CODES) return uvec4(words_of(v_halves(2 * at)), words_of(v_halves(2 * at + 1)));
    const uint word = v_off + at;
    return uvec4(v1[word], v1[word + 1], v1[word + 2], v1[word - 2 * (column % 4)]);
}

// Convert four codes, stored as c + 128, to F16. Return elements 0, 2, 1, 3. The F16 with bits 0x6400 | c is
// 1,024 + c.
uvec2 halves_of_codes(uint codes, f16vec2 d) {
    const uvec2 pairs = uvec2(codes, codes >> 8) & 0x00FF00FFu | 0x64006400u;
    const f16vec2 zero = f16vec2(1152.0);
    return uvec2(packFloat2x16((unpackFloat2x16(pairs.x) - zero) * d), packFloat2x16((unpackFloat2x16(pairs.y) - zero) * d));
}

uvec4 halves_of_held(uvec4 held, bool second) {
    const uint first4 = second ? held.y : held.x >> 16 | held.y << 16;
    const uint last4 = second ? held.z : held.y >> 16 | held.z << 16;
    const f16vec2 scales = unpackFloat2x16(held.w);
    const f16vec2 d = f16vec2(second ? scales.y : scales.x);
    return uvec4(halves_of_codes(first4 ^ 0x80808080u, d), halves_of_codes(last4 ^ 0x80808080u, d));
}

uint k_stride, v_stride; // from key to key
uint own_head;
uvec4 k_held[K_ROUNDS], v_held[4 * V_ROUNDS];


void store_k_round(uint j, uint chunk) {
    if (CELL_BLOCK * K_COLUMNS % LOCAL != 0 && k_key(j) >= CELL_BLOCK) return;
    const uvec4 halves = K_CODES ? halves_of_held(k_held[j], is_second(chunk * K_COLUMNS + k_column(j))) : k_held[j];
    const uint at = k_key(j) * K_STRIDE + 2 * k_column(j);
    kv_tile[at] = quad_of(halves.xy);
    kv_tile[at + 1] = quad_of(halves.zw);
}

void store_k(uint chunk) {
    [[unroll]] for (uint j = 0; j < K_ROUNDS; ++j) store_k_round(j, chunk);
}

// Store V transposed, because the matrix units read the columns of V as rows. Invalid keys become zeros,
// because uninitialised memory may be NaN.
void store_v(uint chunk, uint first_valid, uint n_valid) {
    const uint keys = gl_LocalInvocationID.x % V_KEYS;
    if (first_valid > 0 || n_valid < CELL_BLOCK) {
        [[unroll]] for (uint e = 0; e < 4 * V_ROUNDS; ++e) {
            const uint key = 4 * keys + e % 4;
            if (key < first_valid || key >= n_valid) v_held[e] = uvec4(0);
        }
    }
    [[unroll]] for (uint j = 0; j < V_ROUNDS; ++j) {
        if (V_KEYS * V_COLUMNS % LOCAL != 0 && v_column(j) >= V_COLUMNS) continue;
        uvec4 halves[4];
        [[unroll]] for (uint u = 0; u < 4; ++u) {
            const uvec4 held = v_held[4 * j + u];
            halves[u] = V_CODES ? halves_of_held(held, is_second(chunk * V_COLUMNS + v_column(j))) : held;
        }
        [[unroll]] for (uint half4 = 0; half4 < 2; ++half4) {
            QUAD quads[4];
            [[unroll]] for (uint u = 0; u < 4; ++u) quads[u] = quad_of(half4 == 0 ? halves[u].xy : halves[u].zw);
            [[unroll]] for (uint i = 0; i < 4; ++i) {
                const uint d = 8 * v_column(j) + 4 * half4 + (V_CODES ? 2 * (i % 2) + i / 2 : i);
                kv_tile[d * P_STRIDE + keys] = quad_across(quads, i);
            }
        }
    }
}
