#version 450
#extension GL_GOOGLE_include_directive : require
// Compute attn_decode on matrix units (lib/unit_attention.glsl). A tile's rows are the q heads of a kv head,
// for up to ROWS rows of a run. The loads of a block's V and of the next block's K overlap computation. For
// head size 128, a group of 16 rows takes 19 KiB of shared memory.
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
layout(constant_id = 15) const uint ROWS = 1; // divides the tile's rows
layout(constant_id = 16) const uint FIRST = 0; // first position that rows attend to
layout(constant_id = 17) const uint DIM_PARTS = 1; // the next three: see attn_chosen_coop.comp
layout(constant_id = 18) const uint K_CHUNKS = 1;
layout(constant_id = 19) const uint V_CHUNKS = 1;
layout(constant_id = 20) const uint MOST = 0; // if not 0, only decoding rows at positions below MOST are written
#define M UNIT_M
#define N UNIT_N
#define K UNIT_K
#include "lib/coop.glsl"

layout(push_constant) uniform Push {
    uint q_off, k_off, v_off, cells_off, sinks_off, slopes_off, part_off;
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
layout(set = 0, binding = 5) readonly buffer Slopes { float slopes[]; }; // of attn_decode
layout(set = 0, binding = 6) writeonly buffer Part { float part[]; };

#define STEP_BINDING 7
#include "lib/step.glsl"
#include "lib/step_rows.glsl"
#include "lib/cells.glsl"
#include "lib/kv_quads.glsl"
#include "lib/sinks.glsl"
#include "lib/tanh.glsl"
const uint SCORE_UNROLL = UNROLL;
#include "lib/unit_attention.glsl"
const bool KEEPS = true;
#include "lib/unit_pieces.glsl"
#include "lib/unit_blocks.glsl"
#include "lib/unit_chunks.glsl"

#define FIRST_KEY FIRST
#include "lib/window.glsl"

const uint HEADS = TQ / ROWS;
#include "lib/row_tile.glsl"

int first_head;
uint begin_head, end_head; // the tile's heads on this device
uint n_tile_rows;

bool is_here(uint row) {
    const uint head = head_of(row);
    const bool is_head = head >= begin_head && head < end_head;
    if (ROWS == 1) return is_head;
    return is_head && row_of(row) < n_tile_rows;
}

// Each row of the tile is one head of one row of the step. Return step row * n_heads + head.
uint index_of(uint row) { return (gl_WorkGroupID.x + row_of(row)) * n_heads + uint(first_head + int(head_of(row))); }

uint result_of(uint row) {
    const uint index = index_of(row);
    return part_off + (FINAL != 0 ? index * HEAD_V : (index * n_splits + gl_WorkGroupID.z) * (HEAD_V + 2));
}

float bias_of(uint key_pos) { return 0.0; }

void put(uint row, uint d, float value) {
    if (is_here(row)) part[result_of(row) + d] = value;
}

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint tiles = (group + HEADS - 1) / HEADS;
    const uint kv_head = gl_WorkGroupID.y / tiles;
    const uint first_in_group = gl_WorkGroupID.y % tiles * HEADS;
    const uint step_row = gl_WorkGroupID.x;
    n_tile_rows = rows_from(step_row);
    if (n_tile_rows == 0) return;
    const uvec2 place = step_place(step_row);
    if (MOST != 0 && (place.x >= MOST || step_row >= step_n_decode())) return;
    const uint slot = place.y;
    // see row_attention.glsl
    first_head = int(kv_head * group + first_in_group) - int(q_first);
    begin_head = uint(max(-first_head, 0));
    end_head = uint(clamp(int(n_heads) - first_head, 0, int(min(HEADS, group - first_in_group))));
    if (begin_head >= end_head) return; // another device has this tile's heads

    const uint n_keys = step_row < step_n_decode() ? place.x + 1 : 0;
    const uint first_key = first_key_of(n_keys);
    const uint n_blocks = (n_keys + CELL_BLOCK - 1) / CELL_BLOCK;
    const uint per_split = (n_blocks - first_key / CELL_BLOCK + n_splits - 1) / n_splits;
    const uint first_block = first_key / CELL_BLOCK + gl_WorkGroupID.z * per_split;
    const uint end_block = min(first_block + per_split, n_blocks);

    for (uint e = thread; e < TQ * K_QUADS; e += LOCAL) {
        const uint row = e / K_QUADS;
        vec4 value = vec4(0.0);
        if (is_here(row)) {
            const uint at = q_off + index_of(row) * HEAD_K + 4 * (e % K_QUADS);
            value = vec4(q[at], q[at + 1], q[at + 2], q[at + 3]);
        }
        q_tile[row * Q_STRIDE + e % K_QUADS] = half_quad(K_CODES ? value.xzyw : value);
    }
    clear_sums();
    find_places(kv_head);
    uint cell = block_cell(slot, first_block);
    if (first_block < end_block) hold_k(cell, 0);
    const uint own_keys = ROWS == 1 ? n_keys : n_keys + row_of(row_of_tile());
    const uint own_first = ROWS == 1 ? first_key : first_key_of(own_keys);

    for (uint block = first_block; block < end_block; ++block) {
        const uint block_pos = block * CELL_BLOCK;
        const uint next = block_cell(slot, min(block + 1, end_block - 1));
        score_block(cell, next);
        weigh_keys(block_pos, own_first, own_keys - 1);
        const uint n_valid = min(n_keys + n_tile_rows - 1 - block_pos, CELL_BLOCK);
        add_block(cell, next, max(first_key, block_pos) - block_pos, n_valid);
        cell = next;
    }
    join_sums();
    const uint row = row_of_tile();
    if (FINAL == 0 && key_part() == 0 && is_here(row)) {
        part[result_of(row) + HEAD_V] = m;
        part[result_of(row) + HEAD_V + 1] = l;
    }
    put_results(FINAL == 0 ? 1.0 : l > 0.0 ? inverse_sum(m, l, uint(clamp(first_head + int(head_of(row)), 0, int(n_heads) - 1))) : 0.0);
}
