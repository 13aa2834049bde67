#version 450
#extension GL_GOOGLE_include_directive : require
// Compute attn_decode on matrix units (lib/unit_attention.glsl). The q heads of a kv head are the rows of a
// tile. The loads of a block's V and of the next block's K overlap computation. Heads of 128 dimensions and a
// group of 16 rows take 19 KiB of shared memory.
#include "lib/types.glsl"

layout(constant_id = 1) const uint UNIT_M = 16; // the units multiply [M, K] by [K, N]
layout(constant_id = 2) const uint UNIT_N = 16;
layout(constant_id = 3) const uint UNIT_K = 16;
layout(constant_id = 4) const uint LANES = 32;
layout(constant_id = 5) const uint ROW_GROUPS = 1;
layout(constant_id = 6) const uint V_PARTS = 2;
layout(constant_id = 7) const uint UNROLL = 1; // matrices of q or p per iteration
layout(constant_id = 8) const uint HEAD_K = 64; // a multiple of UNROLL * UNIT_K
layout(constant_id = 9) const uint HEAD_V = 64; // a multiple of V_PARTS * UNIT_N
layout(constant_id = 10) const uint HAS_SINKS = 0; // used with FINAL
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
// The caches are also declared without readonly, because RADV may delay readonly loads until their use.
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
#include "lib/sinks.glsl"
#include "lib/tanh.glsl"
#include "lib/unit_attention.glsl"
const bool KEEPS = true;
#include "lib/unit_pieces.glsl"

int first_head;
uint begin_head, end_head; // the tile's rows on this device

uint result_of(uint row) {
    const uint index = gl_WorkGroupID.z * n_heads + uint(first_head + int(row));
    return part_off + (FINAL != 0 ? index * HEAD_V : (index * n_splits + gl_WorkGroupID.y) * (HEAD_V + 2));
}

void put(uint row, uint d, float value) {
    if (row >= begin_head && row < end_head) part[result_of(row) + d] = value;
}

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint tiles = (group + TQ - 1) / TQ;
    const uint kv_head = gl_WorkGroupID.x / tiles;
    const uint first_in_group = gl_WorkGroupID.x % tiles * TQ;
    const uint step_row = gl_WorkGroupID.z;
    const uint slot = step_params.rows[step_row].y;
    // see row_attention.glsl
    first_head = int(kv_head * group + first_in_group) - int(q_first);
    begin_head = uint(max(-first_head, 0));
    end_head = uint(clamp(int(n_heads) - first_head, 0, int(min(TQ, group - first_in_group))));
    if (begin_head >= end_head) return; // another device has this tile's heads

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
        barrier(); // all threads have multiplied V of the previous block
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
    put_results(FINAL == 0 ? 1.0 : l > 0.0 ? inverse_sum(m, l, uint(clamp(first_head + int(row), 0, int(n_heads) - 1))) : 0.0);
}
