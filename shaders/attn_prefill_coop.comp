#version 450
#extension GL_GOOGLE_include_directive : require
// Compute attn_prefill on matrix units (lib/unit_attention.glsl). For head size 128, 4 groups of 16 rows take
// 43 KiB of shared memory.
#include "lib/types.glsl"

layout(constant_id = 1) const uint UNIT_M = 16; // see attn_decode_coop.comp
layout(constant_id = 2) const uint UNIT_N = 16;
layout(constant_id = 3) const uint UNIT_K = 16;
layout(constant_id = 4) const uint LANES = 32;
layout(constant_id = 5) const uint ROW_GROUPS = 4;
// V_PARTS subgroups share the output of a group of rows, so a subgroup's share fits in registers.
layout(constant_id = 6) const uint V_PARTS = 1;
layout(constant_id = 7) const uint UNROLL = 1;
layout(constant_id = 8) const uint HEAD_K = 64;
layout(constant_id = 9) const uint HEAD_V = 64;
layout(constant_id = 10) const uint HAS_SINKS = 0;
layout(constant_id = 11) const uint K_TYPE = 1;
layout(constant_id = 12) const uint V_TYPE = 1;
layout(constant_id = 13) const uint HAS_SOFTCAP = 0;
layout(constant_id = 14) const uint HAS_SLOPES = 0;
layout(constant_id = 15) const uint MOST = 0; // Rows at positions from MOST on are not written (0: all rows are).
layout(constant_id = 16) const uint DIM_PARTS = 1; // the next three: see attn_chosen_coop.comp
layout(constant_id = 17) const uint K_CHUNKS = 1;
layout(constant_id = 18) const uint V_CHUNKS = 1;
#define M UNIT_M
#define N UNIT_N
#define K UNIT_K
#include "lib/coop.glsl"

layout(push_constant) uniform Push {
    uint q_off, k_off, v_off, cells_off, sinks_off, slopes_off, y_off;
    uint n_heads, n_kv, group, q_first, n_rows, blocks_per_slot, window, chunk, first_head, causal;
    float scale, softcap;
};
layout(set = 0, binding = 0) readonly buffer Q { float q[]; };
layout(set = 0, binding = 1) readonly buffer KCache { uint k[]; };
layout(set = 0, binding = 1) buffer KCache1 { uint k1[]; }; // see attn_decode_coop.comp
layout(set = 0, binding = 1) buffer KCache4 { uvec4 k4[]; };
layout(set = 0, binding = 2) readonly buffer VCache { uint v[]; };
layout(set = 0, binding = 2) buffer VCache1 { uint v1[]; };
layout(set = 0, binding = 2) buffer VCache4 { uvec4 v4[]; };
layout(set = 0, binding = 3) readonly buffer Cells { uint cells[]; };
layout(set = 0, binding = 4) readonly buffer Sinks { float sinks[]; };
layout(set = 0, binding = 5) readonly buffer Slopes { float slopes[]; };
layout(set = 0, binding = 6) writeonly buffer Y { float y[]; };

#define STEP_BINDING 7
#include "lib/step.glsl"
#include "lib/cells.glsl"
#include "lib/kv_quads.glsl"
#include "lib/sinks.glsl"
#include "lib/tanh.glsl"
const uint SCORE_UNROLL = UNROLL;
#include "lib/unit_attention.glsl"
const bool KEEPS = LANES > 16; // with 16 lanes (Intel), kept addresses would spill registers
#include "lib/unit_pieces.glsl"
#include "lib/unit_blocks.glsl"
#include "lib/unit_chunks.glsl"
#include "lib/query_tiles.glsl"

const bool IN_CHUNKS = K_CHUNKS > 1 || V_CHUNKS > 1;

QueryTile tile;

uint head() { return first_head + gl_WorkGroupID.y; }

float bias_of(uint key_pos) {
    return HAS_SLOPES != 0 ? distance_bias(tile.first_pos + row_of_tile(), key_pos, head()) : 0.0;
}

void put(uint row, uint d, float value) {
    const bool is_written = MOST == 0 || tile.first_pos + row < MOST;
    if (row < tile.n && is_written) y[y_off + ((tile.first_row + row) * n_heads + head()) * HEAD_V + d] = value;
}

void main() {
    const uint kv_head = (q_first + head()) / group;
    tile = find_query_tile(gl_WorkGroupID.x);
    if (tile.n == 0) {
        zero_rows(tile.first_row, head());
        return;
    }
    if (MOST != 0 && tile.first_pos >= MOST) return;
    const uint n_keys = end_key_of(tile.first_pos + tile.n - 1, tile.end);
    const uint first_key = first_key_of(tile.first_pos, tile.begin);

    for (uint e = gl_LocalInvocationID.x; e < TQ * K_QUADS; e += LOCAL) {
        const uint row = tile.first_row + min(e / K_QUADS, tile.n - 1); // surplus rows repeat the last row
        const uint at = q_off + (row * n_heads + head()) * HEAD_K + 4 * (e % K_QUADS);
        const vec4 value = vec4(q[at], q[at + 1], q[at + 2], q[at + 3]);
        q_tile[e / K_QUADS * Q_STRIDE + e % K_QUADS] = half_quad(K_CODES ? value.xzyw : value);
    }
    find_places(kv_head);
    const uint row_pos = tile.first_pos + row_of_tile();
    const uint first_seen = max(first_key, first_key_of(row_pos, tile.begin));
    const uint last_seen = end_key_of(row_pos, tile.end) - 1;
    clear_sums();
    if (IN_CHUNKS) hold_k(block_cell(tile.slot, first_key / CELL_BLOCK), 0);

    for (uint block = first_key / CELL_BLOCK; block * CELL_BLOCK < n_keys; ++block) {
        const uint cell = block_cell(tile.slot, block);
        const uint block_pos = block * CELL_BLOCK;
        const uint n_valid = min(n_keys - block_pos, CELL_BLOCK);
        const uint first_valid = max(first_key, block_pos) - block_pos;

        if (IN_CHUNKS) {
            const uint next = block_cell(tile.slot, min(block + 1, (n_keys - 1) / CELL_BLOCK));
            score_block(cell, next);
            weigh_keys(block_pos, first_seen, last_seen);
            add_block(cell, next, first_valid, n_valid);
            continue;
        }
        barrier(); // all threads have multiplied V of the previous block
        if (KEEPS) {
            hold_k(cell, 0);
            store_k(0);
        } else {
            [[unroll]] for (uint j = 0; j < K_ROUNDS; ++j) {
                hold_k_round(cell, j, 0);
                store_k_round(j, 0);
            }
        }
        barrier();
        if (KEEPS) hold_v(cell, 0);
        score_keys(0);
        barrier();
        if (!KEEPS) {
            hold_v(cell, 0);
            store_v(0, first_valid, n_valid);
        }
        weigh_keys(block_pos, first_seen, last_seen);
        if (KEEPS) store_v(0, first_valid, n_valid);
        barrier();
        add_values(0);
    }
    join_sums();
    put_results(inverse_sum(m, l, head()));
}
