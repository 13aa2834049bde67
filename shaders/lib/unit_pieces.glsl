// Copy blocks of K and V from the cache to the tiles of lib/unit_attention.glsl. A thread copies pieces of
// eight elements. The including file also declares the caches as `uint k1[]`, `uvec4 k4[]`, `uint v1[]`,
// `uvec4 v4[]`, without readonly. The constant KEEPS says whether addresses of pieces stay in registers.

const uint K_PIECES = HEAD_K / 8;
const uint V_PIECES = HEAD_V / 8;
const uint K_ROUNDS = (CELL_BLOCK * K_PIECES + LOCAL - 1) / LOCAL; // Per invocation.
const uint V_KEYS = CELL_BLOCK / 4; // groups of four keys
const uint V_ROUNDS = (V_KEYS * V_PIECES + LOCAL - 1) / LOCAL; // Per invocation.
// K_EVEN is set if all pieces of an invocation are at the same position within their keys.
const bool K_EVEN = LOCAL % K_PIECES == 0;
// Q8_0 is converted to F16 when it is stored in the tile. Two blocks of Q8_0 have 17 words. Only the codes of
// the second block begin at a word boundary.
const bool K_IS_Q8 = K_TYPE == CACHE_Q8_0;
const bool V_IS_Q8 = V_TYPE == CACHE_Q8_0;
const bool K_WHOLE_PAIRS = HEAD_K % 64 == 0;
const bool V_WHOLE_PAIRS = HEAD_V % 64 == 0;
const bool K_CODES = K_IS_Q8 && K_WHOLE_PAIRS;
const bool V_CODES = V_IS_Q8 && V_WHOLE_PAIRS;

uint k_key(uint j) {
    return K_EVEN ? gl_LocalInvocationID.x / K_PIECES + j * (LOCAL / K_PIECES) : (gl_LocalInvocationID.x + j * LOCAL) / K_PIECES;
}

uint k_column(uint j) { return (K_EVEN ? gl_LocalInvocationID.x : gl_LocalInvocationID.x + j * LOCAL) % K_PIECES; }

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
uint k_own[K_ROUNDS], v_own[V_ROUNDS]; // addresses of pieces within a block
uvec4 k_held[K_ROUNDS], v_held[4 * V_ROUNDS];

uint k_place(uint j) {
    const uint key = min(k_key(j), CELL_BLOCK - 1); // surplus invocations repeat the last key
    return key * k_stride + place(own_head * K_PIECES + k_column(j), K_CODES);
}

uint v_place(uint j) {
    const uint key = 4 * (gl_LocalInvocationID.x % V_KEYS);
    return key * v_stride + place(own_head * V_PIECES + min(v_column(j), V_PIECES - 1), V_CODES);
}

void find_places(uint kv_head) {
    own_head = kv_head;
    k_stride = place(n_kv * K_PIECES, K_CODES);
    v_stride = place(n_kv * V_PIECES, V_CODES);
    [[unroll]] for (uint j = 0; KEEPS && j < K_ROUNDS; ++j) k_own[j] = k_place(j);
    [[unroll]] for (uint j = 0; KEEPS && j < V_ROUNDS; ++j) v_own[j] = v_place(j);
}

void hold_k_round(uint cell, uint j) {
    k_held[j] = k_piece(cell * k_stride + (KEEPS ? k_own[j] : k_place(j)), k_column(j));
}

void store_k_round(uint j) {
    if (CELL_BLOCK * K_PIECES % LOCAL != 0 && k_key(j) >= CELL_BLOCK) return;
    const uvec4 halves = K_CODES ? halves_of_held(k_held[j], is_second(k_column(j))) : k_held[j];
    const uint at = k_key(j) * K_STRIDE + 2 * k_column(j);
    kv_tile[at] = quad_of(halves.xy);
    kv_tile[at + 1] = quad_of(halves.zw);
}

// K of invalid keys is loaded, too, and their scores are masked later.
void hold_k(uint cell) {
    [[unroll]] for (uint j = 0; j < K_ROUNDS; ++j) hold_k_round(cell, j);
}

void store_k() {
    [[unroll]] for (uint j = 0; j < K_ROUNDS; ++j) store_k_round(j);
}

void hold_v(uint cell) {
    [[unroll]] for (uint j = 0; j < V_ROUNDS; ++j) {
        const uint own = KEEPS ? v_own[j] : v_place(j);
        [[unroll]] for (uint u = 0; u < 4; ++u) {
            v_held[4 * j + u] = v_piece((cell + u) * v_stride + own, min(v_column(j), V_PIECES - 1));
        }
    }
}

// Store V transposed, because the matrix units read the columns of V as rows. Invalid keys become zeros,
// because uninitialised memory may be NaN.
void store_v(uint first_valid, uint n_valid) {
    const uint keys = gl_LocalInvocationID.x % V_KEYS;
    if (first_valid > 0 || n_valid < CELL_BLOCK) {
        [[unroll]] for (uint e = 0; e < 4 * V_ROUNDS; ++e) {
            const uint key = 4 * keys + e % 4;
            if (key < first_valid || key >= n_valid) v_held[e] = uvec4(0);
        }
    }
    [[unroll]] for (uint j = 0; j < V_ROUNDS; ++j) {
        if (V_KEYS * V_PIECES % LOCAL != 0 && v_column(j) >= V_PIECES) continue;
        uvec4 halves[4];
        [[unroll]] for (uint u = 0; u < 4; ++u) {
            const uvec4 held = v_held[4 * j + u];
            halves[u] = V_CODES ? halves_of_held(held, is_second(v_column(j))) : held;
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
