#version 450
#extension GL_GOOGLE_include_directive : require
// Compute attention for a tile of TQ rows from one run, with online softmax over blocks of 32 keys. The
// workgroup ID is (tile, head - first_head), because several dispatches may share the heads. Workgroups after
// the last tile write zeros to the rows outside all runs. The host chooses TQ so that shared memory is at
// most 15.6 KiB.
#include "lib/types.glsl"

layout(constant_id = 1) const uint TQ = 4; // 4, 8 or 16
layout(constant_id = 2) const uint HEAD_K = 64;
layout(constant_id = 3) const uint HEAD_V = 64;
layout(constant_id = 4) const uint HAS_SINKS = 0;
layout(constant_id = 5) const uint K_TYPE = 1;
layout(constant_id = 6) const uint V_TYPE = 1;
layout(constant_id = 7) const uint HAS_SOFTCAP = 0;
layout(constant_id = 8) const uint HAS_SLOPES = 0;
layout(constant_id = 9) const uint BATCH = 1; // quads in flight

layout(push_constant) uniform Push {
    uint q_off, k_off, v_off, cells_off, sinks_off, slopes_off, y_off;
    uint n_heads, n_kv, group, q_first, n_rows, blocks_per_slot, window, chunk, first_head, causal;
    float scale, softcap;
};
layout(set = 0, binding = 0) readonly buffer Q { float q[]; };
layout(set = 0, binding = 1) readonly buffer K { uint k[]; };
layout(set = 0, binding = 2) readonly buffer V { uint v[]; };
layout(set = 0, binding = 3) readonly buffer Cells { uint cells[]; };
layout(set = 0, binding = 4) readonly buffer Sinks { float sinks[]; };
layout(set = 0, binding = 5) readonly buffer Slopes { float slopes[]; };
layout(set = 0, binding = 6) writeonly buffer Y { float y[]; };

#define STEP_BINDING 7
#include "lib/step.glsl"
#include "lib/cells.glsl"
#include "lib/kv_quads.glsl"
#include "lib/query_tiles.glsl"
#include "lib/sinks.glsl"
#include "lib/tanh.glsl"
#include "lib/v_quads.glsl"

const uint K_QUADS = HEAD_K / 4;
const uint S_GROUPS = LOCAL / CELL_BLOCK; // groups of threads; each scores S_ROWS rows
const uint S_ROWS = TQ / S_GROUPS;
const uint V_GROUPS = LOCAL / V_QUADS >= 4 ? 4 : (LOCAL / V_QUADS >= 2 ? 2 : 1);
const uint V_ROWS = TQ / V_GROUPS;
const uint K_PIECE = BATCH > S_GROUPS ? BATCH : S_GROUPS; // quads per key in shared memory
const uint K_READS = K_PIECE / S_GROUPS;
const bool K_QUANTIZED = K_TYPE >= CACHE_Q8_0;
const bool K_WHOLE_PAIRS = K_QUADS % 16 == 0;
const bool K_PIECE_OF_BLOCKS = K_PIECE % 8 == 0;
const bool K_SETS_FIT_BLOCK = 8 % S_GROUPS == 0;
const bool K_WORDS = K_QUANTIZED && K_WHOLE_PAIRS && K_PIECE_OF_BLOCKS && K_SETS_FIT_BLOCK;
const uint V_BATCH = BATCH > V_ROUNDS ? BATCH / V_ROUNDS : 1; // keys whose V is in flight
const uint K_STRIDE = K_PIECE + 1; // odd, so that keys begin at different memory banks

shared vec4 q_tile[TQ * K_QUADS];
shared float score[TQ * CELL_BLOCK]; // then the probabilities
shared float row_max[TQ];
shared float row_rescale[TQ];
shared vec4 k_tile[CELL_BLOCK * K_STRIDE]; // [key][quad]

uint thread = gl_LocalInvocationID.x;
uint score_key = thread % CELL_BLOCK;
uint s_row0 = thread / CELL_BLOCK * S_ROWS;
uint v_row0 = min(thread / V_QUADS, V_GROUPS - 1) * V_ROWS; // nothing reads the sums of surplus threads
float m = NEG_LARGE; // maximum of row `thread`
float s[S_ROWS]; // scores of score_key for rows s_row0, ...
float l[V_ROWS]; // sums of p
vec4 acc[V_ROWS * V_ROUNDS]; // sums of p * v

void clear_sums() {
    [[unroll]] for (uint a = 0; a < V_ROWS; ++a) l[a] = 0.0;
    [[unroll]] for (uint a = 0; a < V_ROWS * V_ROUNDS; ++a) acc[a] = vec4(0.0);
}

QueryTile tile;
uint head, kv_head;
uint first_key; // first key that any row of the tile attends to

struct Block {
    uint cell, pos; // of its first key
    uint first_valid, n_valid; // keys that some row of the tile attends to
};

void read_queries() {
    for (uint e = thread; e < TQ * K_QUADS; e += LOCAL) {
        vec4 value = vec4(0.0);
        if (e / K_QUADS < tile.n) {
            const uint at = q_off + ((tile.first_row + e / K_QUADS) * n_heads + head) * HEAD_K + 4 * (e % K_QUADS);
            value = vec4(q[at], q[at + 1], q[at + 2], q[at + 3]) * scale;
        }
        q_tile[e] = value;
    }
    barrier();
}

Block find_block(uint number, uint n_keys) {
    const uint pos = number * CELL_BLOCK;
    return Block(block_cell(tile.slot, number), pos, max(first_key, pos) - pos, min(n_keys - pos, CELL_BLOCK));
}

void multiply_own_key(Block block, bool valid) {
    const uint base = ((block.cell + score_key) * n_kv + kv_head) * K_QUADS;
    for (uint at = base; valid && at < base + K_QUADS; ++at) {
        const vec4 value = k_quad(at);
        [[unroll]] for (uint a = 0; a < S_ROWS; ++a) s[a] += dot(value, q_tile[(s_row0 + a) * K_QUADS + at - base]);
    }
}

// K is copied to shared memory, because direct reads by 32 threads would read 32 cache lines at a time.
void multiply_pieces(Block block, bool valid) {
    const uint key = thread / S_GROUPS;
    const uint quad = thread % S_GROUPS;
    const uint base = (block.cell * n_kv + kv_head) * K_QUADS;
    // All cells of a block exist, so reading invalid keys is safe.
    const uint key_base = base + key * n_kv * K_QUADS;
    for (uint at = base; at < base + K_QUADS; at += K_PIECE) {
        const uint first = at - base;
        vec4 value[K_READS];
        [[unroll]] for (uint i = 0; i < K_READS; ++i) {
            if (K_WORDS) {
                const uint skipped = (first / 8 + i * S_GROUPS / 8) * halves_of(K_TYPE);
                value[i] = k_block_quad(k_off + key_base / 16 * halves_of(K_TYPE), skipped, quad + i * S_GROUPS % 8);
            } else {
                value[i] = k_quad(key_base + min(first + quad + i * S_GROUPS, K_QUADS - 1));
            }
        }
        [[unroll]] for (uint i = 0; i < K_READS; ++i) k_tile[key * K_STRIDE + quad + i * S_GROUPS] = value[i];
        barrier();
        for (uint c = 0; valid && c < min(K_PIECE, K_QUADS - first); ++c) {
            const vec4 k_value = k_tile[score_key * K_STRIDE + c];
            [[unroll]] for (uint a = 0; a < S_ROWS; ++a) s[a] += dot(k_value, q_tile[(s_row0 + a) * K_QUADS + first + c]);
        }
        barrier();
    }
}

void score_block(Block block) {
    const bool valid = score_key >= block.first_valid && score_key < block.n_valid;
    [[unroll]] for (uint a = 0; a < S_ROWS; ++a) s[a] = 0.0;
    // The loops in multiply_own_key and multiply_pieces have variable bounds, because drivers would take
    // seconds to unroll constant loops.
    if (S_GROUPS == 1) {
        multiply_own_key(block, valid);
    } else {
        multiply_pieces(block, valid);
    }
    [[unroll]] for (uint a = 0; a < S_ROWS; ++a) {
        // While a row has only masked keys, its maximum is NEG_LARGE, and each key adds exp(0) = 1 to the
        // sums. The first unmasked key clears these sums, because exp(NEG_LARGE - m) is 0.
        const uint row_pos = tile.first_pos + s_row0 + a;
        const uint key_pos = block.pos + score_key;
        const bool masked = key_pos >= end_key_of(row_pos, tile.end) || key_pos < first_key_of(row_pos, tile.begin);
        if (HAS_SOFTCAP != 0) s[a] = soft_cap(s[a], softcap);
        if (HAS_SLOPES != 0) s[a] += distance_bias(row_pos, key_pos, head);
        if (masked) s[a] = NEG_LARGE;
        score[(s_row0 + a) * CELL_BLOCK + score_key] = s[a];
    }
    barrier();
}

void soften_block(uint n_valid) {
    if (thread < TQ) {
        float m_new = m;
        for (uint first = 0; first < n_valid; first += 4 * BATCH) {
            [[unroll]] for (uint j = 0; j < 4 * BATCH; ++j) m_new = max(m_new, score[thread * CELL_BLOCK + first + j]);
        }
        row_rescale[thread] = exp(m - m_new);
        row_max[thread] = m_new;
        m = m_new;
    }
    barrier();
    [[unroll]] for (uint a = 0; a < S_ROWS; ++a) {
        score[(s_row0 + a) * CELL_BLOCK + score_key] = exp(s[a] - row_max[s_row0 + a]);
    }
    barrier();
}

void add_values(Block block) {
    [[unroll]] for (uint a = 0; a < V_ROWS; ++a) {
        l[a] *= row_rescale[v_row0 + a];
        [[unroll]] for (uint i = 0; i < V_ROUNDS; ++i) acc[a * V_ROUNDS + i] *= row_rescale[v_row0 + a];
    }
    for (uint first = BATCH > 1 ? 0 : block.first_valid; first < block.n_valid; first += V_BATCH) {
        vec4 value[V_BATCH * V_ROUNDS]; // of the nearest valid key if a key is masked
        [[unroll]] for (uint u = 0; u < V_BATCH; ++u) {
            const uint key = clamp(first + u, block.first_valid, block.n_valid - 1);
            const uint base = ((block.cell + key) * n_kv + kv_head) * V_QUADS;
            [[unroll]] for (uint i = 0; i < V_ROUNDS; ++i) value[u * V_ROUNDS + i] = v_quad_of(base, i);
        }
        [[unroll]] for (uint u = 0; u < V_BATCH; ++u) {
            [[unroll]] for (uint a = 0; a < V_ROWS; ++a) {
                const float p = score[(v_row0 + a) * CELL_BLOCK + first + u];
                l[a] += p;
                [[unroll]] for (uint i = 0; i < V_ROUNDS; ++i) acc[a * V_ROUNDS + i] += p * value[u * V_ROUNDS + i];
            }
        }
    }
}

void put_results() {
    [[unroll]] for (uint a = 0; a < V_ROWS; ++a) {
        const uint row = v_row0 + a;
        if (row >= tile.n) break;
        const uint base = y_off + ((tile.first_row + row) * n_heads + head) * HEAD_V;
        const float factor = inverse_sum(row_max[row], l[a], head);
        [[unroll]] for (uint i = 0; i < V_ROUNDS; ++i) {
            const uint quad = v_quad0 + i * LOCAL;
            if (quad >= V_QUADS) continue;
            for (uint c = 0; c < 4; ++c) y[base + 4 * quad + c] = acc[a * V_ROUNDS + i][c] * factor;
        }
    }
}

void main() {
    head = first_head + gl_WorkGroupID.y;
    kv_head = (q_first + head) / group;
    tile = find_query_tile(gl_WorkGroupID.x);
    if (tile.n == 0) {
        zero_rows(tile.first_row, head);
        return;
    }
    const uint n_keys = end_key_of(tile.first_pos + tile.n - 1, tile.end);
    first_key = first_key_of(tile.first_pos, tile.begin);

    read_queries();
    clear_sums();
    for (uint number = first_key / CELL_BLOCK; number * CELL_BLOCK < n_keys; ++number) {
        const Block block = find_block(number, n_keys);
        score_block(block);
        soften_block(block.n_valid);
        add_values(block);
        if (S_GROUPS == 1) barrier(); // with several groups, multiply_pieces has this barrier
    }
    if (thread / V_QUADS < V_GROUPS) put_results();
}
