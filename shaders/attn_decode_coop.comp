#version 450
#extension GL_GOOGLE_include_directive : require
// As attn_decode, on matrix units (lib/unit_attention.glsl): the q heads of a kv head are the rows of a tile. Workgroup
// (tile of heads, split, row). Loads go to registers and are under way meanwhile: V of a block while its keys are scored, K
// of the next block until this one is done. For heads of 128 and a group of 16 rows: 19 KiB of shared memory.
#include "lib/types.glsl"

layout(constant_id = 1) const uint UNIT_M = 16; // of the device's matrices: [M, K] by [K, N]
layout(constant_id = 2) const uint UNIT_N = 16;
layout(constant_id = 3) const uint UNIT_K = 16;
layout(constant_id = 4) const uint LANES = 32; // invocations of a subgroup
layout(constant_id = 5) const uint ROW_GROUPS = 1;
layout(constant_id = 6) const uint V_PARTS = 2;
layout(constant_id = 7) const uint UNROLL = 1; // matrices of q in a round of the loop, and of probabilities
layout(constant_id = 8) const uint HEAD_K = 64; // whole rounds
layout(constant_id = 9) const uint HEAD_V = 64; // whole matrices for each of V_PARTS
layout(constant_id = 10) const uint HAS_SINKS = 0; // of FINAL
layout(constant_id = 11) const uint K_TYPE = 1;
layout(constant_id = 12) const uint V_TYPE = 1;
layout(constant_id = 13) const uint HAS_SOFTCAP = 0;
layout(constant_id = 14) const uint FINAL = 0;
#define M UNIT_M
#define N UNIT_N
#define K UNIT_K
#include "lib/coop.glsl"

layout(push_constant) uniform Push {
    uint q_off, k_off, v_off, cells_off, sinks_off, part_off;
    uint n_heads, n_kv, group, q_first, n_rows, blocks_per_slot, n_splits, window, chunk;
    float scale, softcap;
};
layout(set = 0, binding = 0) readonly buffer Q { float q[]; };
layout(set = 0, binding = 1) readonly buffer KCache { uint k[]; };
// The same. A driver may read what is readonly only where it is used (RADV does), so these are not.
layout(set = 0, binding = 1) buffer KCache1 { uint k1[]; };
layout(set = 0, binding = 1) buffer KCache4 { uvec4 k4[]; };
layout(set = 0, binding = 2) readonly buffer VCache { uint v[]; };
layout(set = 0, binding = 2) buffer VCache1 { uint v1[]; };
layout(set = 0, binding = 2) buffer VCache4 { uvec4 v4[]; };
layout(set = 0, binding = 3) readonly buffer Cells { uint cells[]; };
layout(set = 0, binding = 4) readonly buffer Sinks { float sinks[]; };
layout(set = 0, binding = 5) writeonly buffer Part { float part[]; };

#define STEP_BINDING 6
#include "lib/step.glsl"
#include "lib/cells.glsl"
#include "lib/kv_quads.glsl"
#include "lib/tanh.glsl"
#include "lib/unit_attention.glsl"

// ---- pieces of eight elements ----

const uint K_PIECES = HEAD_K / 8;
const uint V_PIECES = HEAD_V / 8;
const uint K_ROUNDS = (CELL_BLOCK * K_PIECES + LOCAL - 1) / LOCAL; // pieces of an invocation
const uint V_KEYS = CELL_BLOCK / 4; // fours of keys
const uint V_ROUNDS = (V_KEYS * V_PIECES + LOCAL - 1) / LOCAL; // pieces of four keys
const bool K_EVEN = LOCAL % K_PIECES == 0; // an invocation's pieces are at the same place of some keys
// Codes become halves when they are stored. Of two blocks of Q8_0, which are 17 words, the second has its codes at words.
// With heads of whole pairs the place in a head tells which one it is. (glslang makes no constant of conditions and &&.)
const bool K_CODES = (K_TYPE ^ CACHE_Q8_0) + HEAD_K % 64 == 0;
const bool V_CODES = (V_TYPE ^ CACHE_Q8_0) + HEAD_V % 64 == 0;

uint k_key(uint j) {
    return K_EVEN ? gl_LocalInvocationID.x / K_PIECES + j * (LOCAL / K_PIECES) : (gl_LocalInvocationID.x + j * LOCAL) / K_PIECES;
}

uint k_column(uint j) { return (K_EVEN ? gl_LocalInvocationID.x : gl_LocalInvocationID.x + j * LOCAL) % K_PIECES; }

uint v_column(uint j) { return (gl_LocalInvocationID.x + j * LOCAL) / V_KEYS; }

bool is_second(uint piece) { return (piece / 4) % 2 == 1; } // of a pair of blocks

// Where piece i of a cache is: the first of the three words around its eight codes, else as many 16 bytes of halves.
uint place(uint i, bool codes) { return codes ? i / 8 * Q8_0_HALVES + i / 4 % 2 * (Q8_0_HALVES / 2) + 2 * (i % 4) : i; }

// Eight halves, or the three words and the one with the scale.
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

// Elements 0, 2, 1, 3 of four codes c + 128: as a half 0x6400 | c is 1,024 + c.
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

// ---- blocks of keys ----

uint k_stride, v_stride; // of places, from key to key
uint k_own[K_ROUNDS], v_own[V_ROUNDS]; // an invocation's first places
uvec4 k_held[K_ROUNDS], v_held[4 * V_ROUNDS];

void find_places(uint kv_head) {
    k_stride = place(n_kv * K_PIECES, K_CODES);
    v_stride = place(n_kv * V_PIECES, V_CODES);
    [[unroll]] for (uint j = 0; j < K_ROUNDS; ++j) {
        const uint key = min(k_key(j), CELL_BLOCK - 1); // surplus invocations read what others read
        k_own[j] = key * k_stride + place(kv_head * K_PIECES + k_column(j), K_CODES);
    }
    [[unroll]] for (uint j = 0; j < V_ROUNDS; ++j) {
        const uint key = 4 * (gl_LocalInvocationID.x % V_KEYS);
        v_own[j] = key * v_stride + place(kv_head * V_PIECES + min(v_column(j), V_PIECES - 1), V_CODES);
    }
}

// The whole block is read, since all of it is memory of the cache: scores of keys that are not seen are masked.
void hold_k(uint cell) {
    [[unroll]] for (uint j = 0; j < K_ROUNDS; ++j) k_held[j] = k_piece(cell * k_stride + k_own[j], k_column(j));
}

void store_k() {
    [[unroll]] for (uint j = 0; j < K_ROUNDS; ++j) {
        if (CELL_BLOCK * K_PIECES % LOCAL != 0 && k_key(j) >= CELL_BLOCK) continue;
        const uvec4 halves = K_CODES ? halves_of_held(k_held[j], is_second(k_column(j))) : k_held[j];
        const uint at = k_key(j) * K_STRIDE + 2 * k_column(j);
        kv_tile[at] = quad_of(halves.xy);
        kv_tile[at + 1] = quad_of(halves.zw);
    }
}

// An invocation has pieces of four keys.
void hold_v(uint cell) {
    [[unroll]] for (uint j = 0; j < V_ROUNDS; ++j) {
        [[unroll]] for (uint u = 0; u < 4; ++u) {
            v_held[4 * j + u] = v_piece((cell + u) * v_stride + v_own[j], min(v_column(j), V_PIECES - 1));
        }
    }
}

// And turns them: a column of V then lies in a row, as the units read it. Keys that are not seen become zeros, since 0
// times what was never written may be NaN.
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
        QUAD low[4], high[4];
        [[unroll]] for (uint u = 0; u < 4; ++u) {
            const uvec4 held = v_held[4 * j + u];
            const uvec4 halves = V_CODES ? halves_of_held(held, is_second(v_column(j))) : held;
            low[u] = quad_of(halves.xy);
            high[u] = quad_of(halves.zw);
        }
        [[unroll]] for (uint i = 0; i < 4; ++i) {
            const uint d = 8 * v_column(j) + (V_CODES ? 2 * (i % 2) + i / 2 : i);
            kv_tile[d * P_STRIDE + keys] = quad_across(low, i);
            kv_tile[(d + 4) * P_STRIDE + keys] = quad_across(high, i);
        }
    }
}

int first_head; // of the tile
uint begin_head, end_head; // rows of the tile that are heads of this device

uint result_of(uint row) { // where its result begins
    const uint index = gl_WorkGroupID.z * n_heads + uint(first_head + int(row));
    return part_off + (FINAL != 0 ? index * HEAD_V : (index * n_splits + gl_WorkGroupID.y) * (HEAD_V + 2));
}

void put(uint row, uint d, float value) {
    if (row >= begin_head && row < end_head) part[result_of(row) + d] = value;
}

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint tiles = (group + TQ - 1) / TQ; // of the q heads of a kv head
    const uint kv_head = gl_WorkGroupID.x / tiles;
    const uint first_in_group = gl_WorkGroupID.x % tiles * TQ;
    const uint step_row = gl_WorkGroupID.z;
    const uint slot = step_params.rows[step_row].y;
    // As in attn_decode: a device may begin and end in the middle of a group.
    first_head = int(kv_head * group + first_in_group) - int(q_first);
    begin_head = uint(max(-first_head, 0));
    end_head = uint(clamp(int(n_heads) - first_head, 0, int(min(TQ, group - first_in_group))));
    if (begin_head >= end_head) return; // all of the tile's heads are another device's

    const uint n_keys = step_row < step_n_decode() ? step_params.rows[step_row].x + 1 : 0;
    uint first_key = window > 0 && n_keys > window ? n_keys - window : 0;
    if (chunk > 0 && n_keys > 0) first_key = max(first_key, (n_keys - 1) / chunk * chunk);
    const uint n_blocks = (n_keys + CELL_BLOCK - 1) / CELL_BLOCK;
    const uint per_split = (n_blocks - first_key / CELL_BLOCK + n_splits - 1) / n_splits;
    const uint first_block = first_key / CELL_BLOCK + gl_WorkGroupID.y * per_split;
    const uint end_block = min(first_block + per_split, n_blocks);

    for (uint e = thread; e < TQ * K_QUADS; e += LOCAL) {
        const uint row = e / K_QUADS;
        vec4 value = vec4(0.0);
        if (row >= begin_head && row < end_head) {
            const uint at = q_off + (step_row * n_heads + uint(first_head + int(row))) * HEAD_K + 4 * (e % K_QUADS);
            value = vec4(q[at], q[at + 1], q[at + 2], q[at + 3]);
        }
        q_tile[row * Q_STRIDE + e % K_QUADS] = half_quad(K_CODES ? value.xzyw : value);
    }
    clear_sums();
    find_places(kv_head);
    uint cell = block_cell(slot, first_block);
    if (first_block < end_block) hold_k(cell);

    for (uint block = first_block; block < end_block; ++block) {
        const uint block_pos = block * CELL_BLOCK;
        barrier(); // V of the block before was multiplied
        store_k();
        barrier();
        hold_v(cell);
        cell = block_cell(slot, min(block + 1, end_block - 1));
        hold_k(cell);
        score_keys();
        barrier();
        weigh_keys(block_pos, first_key, n_keys - 1);
        store_v(max(first_key, block_pos) - block_pos, min(n_keys - block_pos, CELL_BLOCK));
        barrier();
        add_values();
    }
    join_sums();
    const uint row = row_of_tile();
    if (FINAL == 0 && key_part() == 0 && row >= begin_head && row < end_head) {
        part[result_of(row) + HEAD_V] = m;
        part[result_of(row) + HEAD_V + 1] = l;
    }
    put_results(FINAL == 0 ? 1.0 : l > 0.0 ? inverse_sum(uint(clamp(first_head + int(row), 0, int(n_heads) - 1))) : 0.0);
}
