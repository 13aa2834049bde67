#version 450
#extension GL_GOOGLE_include_directive : require
// Compute attn_chosen on matrix units (lib/unit_attention.glsl). A tile's rows are q heads of a kv head. The
// cells of the next block's keys are looked up while a block is computed. K and V pass through shared memory
// in K_CHUNKS and V_CHUNKS parts: for heads of 576 and 512, 16 rows, three and four parts take 40 KiB.
#include "lib/types.glsl"

layout(constant_id = 1) const uint UNIT_M = 16; // see attn_decode_coop.comp
layout(constant_id = 2) const uint UNIT_N = 16;
layout(constant_id = 3) const uint UNIT_K = 16;
layout(constant_id = 4) const uint LANES = 32;
layout(constant_id = 5) const uint ROW_GROUPS = 1;
layout(constant_id = 6) const uint V_PARTS = 2;
layout(constant_id = 7) const uint DIM_PARTS = 1; // divides V_PARTS
layout(constant_id = 8) const uint K_CHUNKS = 1;
layout(constant_id = 9) const uint V_CHUNKS = 1;
layout(constant_id = 10) const uint UNROLL = 1;
layout(constant_id = 11) const uint HEAD_K = 64; // a multiple of K_CHUNKS * DIM_PARTS * UNROLL * UNIT_K
layout(constant_id = 12) const uint HEAD_V = 64; // a multiple of V_CHUNKS * V_PARTS * UNIT_N
layout(constant_id = 13) const uint K_TYPE = 1;
layout(constant_id = 14) const uint V_TYPE = 1;
layout(constant_id = 15) const uint FINAL = 0;
layout(constant_id = 16) const uint DENSE = 0; // other ops compute the rows at positions below DENSE
#define M UNIT_M
#define N UNIT_N
#define K UNIT_K
#include "lib/coop.glsl"

layout(push_constant) uniform Push {
    uint q_off, k_off, v_off, cells_off, chosen_off, part_off;
    uint n_heads, n_kv, group, q_first, n_rows, blocks_per_slot, n_splits, n_chosen, n_lists, block_size, tail;
    float scale;
};
layout(set = 0, binding = 0) readonly buffer Q { float q[]; };
layout(set = 0, binding = 1) readonly buffer KCache { uint k[]; };
layout(set = 0, binding = 1) buffer KCache1 { uint k1[]; }; // see attn_decode_coop.comp
layout(set = 0, binding = 1) buffer KCache4 { uvec4 k4[]; };
layout(set = 0, binding = 2) readonly buffer VCache { uint v[]; };
layout(set = 0, binding = 2) buffer VCache1 { uint v1[]; };
layout(set = 0, binding = 2) buffer VCache4 { uvec4 v4[]; };
layout(set = 0, binding = 3) readonly buffer Cells { uint cells[]; };
layout(set = 0, binding = 4) readonly buffer Chosen { uint chosen[]; };
layout(set = 0, binding = 5) writeonly buffer Part { float part[]; };

#define STEP_BINDING 6
#include "lib/step.glsl"
#include "lib/step_rows.glsl"
#include "lib/cells.glsl"
#include "lib/chosen_keys.glsl"
#include "lib/kv_quads.glsl"
#include "lib/tanh.glsl"
const uint HAS_SOFTCAP = 0;
const float softcap = 0.0;
const uint SCORE_UNROLL = UNROLL;
#include "lib/unit_attention.glsl"
#include "lib/unit_pieces.glsl"

const uint AHEAD = LOCAL > CELL_BLOCK ? LOCAL / CELL_BLOCK : 1; // blocks whose cells are looked up at once

shared uvec4 key_cells[2 * AHEAD * CELL_BLOCK / 4]; // cells of AHEAD blocks and the next AHEAD blocks

int first_head; // see attn_decode_coop.comp
uint begin_head, end_head;

bool is_here(uint row) { return row >= begin_head && row < end_head; }

uint index_of(uint row) { return gl_WorkGroupID.x * n_heads + uint(first_head + int(row)); }

uint result_of(uint row) {
    const uint index = index_of(row);
    return part_off + (FINAL != 0 ? index * HEAD_V : (index * n_splits + gl_WorkGroupID.z) * (HEAD_V + 2));
}

float bias_of(uint key_pos) { return 0.0; }

void put(uint row, uint d, float value) {
    if (is_here(row)) part[result_of(row) + d] = value;
}

uint list; // the row's list
uint slot;
uint n_keys;
uint first_block, end_block;
uint now, next; // indices in key_cells of this block and the next

uint cells_of(uint block) { return (block - first_block) % (2 * AHEAD) * (CELL_BLOCK / 4); }

// Look up the cells of AHEAD blocks. After the last key come copies of it.
void find_cells(uint block) {
    for (uint j = gl_LocalInvocationID.x; j < AHEAD * CELL_BLOCK; j += LOCAL) {
        const uint position = chosen_position(list, min(block * CELL_BLOCK + j, n_keys - 1));
        key_cells[cells_of(block) + j / 4][j % 4] = block_cell(slot, position / CELL_BLOCK) + position % CELL_BLOCK;
    }
}

const bool K_EXACT = CELL_BLOCK * K_COLUMNS % LOCAL == 0; // otherwise surplus invocations repeat the last key

void hold_k(uint from, uint chunk) {
    uint at[K_ROUNDS];
    [[unroll]] for (uint j = 0; j < K_ROUNDS; ++j) {
        const uint key = K_EXACT ? k_key(j) : min(k_key(j), CELL_BLOCK - 1);
        at[j] = key_cells[from + key / 4][key % 4] * k_stride;
    }
    [[unroll]] for (uint j = 0; j < K_ROUNDS; ++j) {
        const uint column = chunk * K_COLUMNS + k_column(j);
        k_held[j] = k_piece(at[j] + place(own_head * K_PIECES + column, K_CODES), column);
    }
}

void hold_v(uint chunk) {
    const uvec4 at = key_cells[now + gl_LocalInvocationID.x % V_KEYS] * v_stride;
    [[unroll]] for (uint j = 0; j < V_ROUNDS; ++j) {
        const uint column = chunk * V_COLUMNS + min(v_column(j), V_COLUMNS - 1);
        const uint own = place(own_head * V_PIECES + column, V_CODES);
        [[unroll]] for (uint u = 0; u < 4; ++u) v_held[4 * j + u] = v_piece(at[u] + own, column);
    }
}

// Add the scores of a chunk of K while the next chunk, or the first of V, is read.
void use_k(uint block, uint chunk) {
    barrier(); // all threads have multiplied the previous chunk
    store_k(chunk);
    if (chunk == 0 && now % (AHEAD * CELL_BLOCK / 4) == 0 && block + AHEAD < end_block) find_cells(block + AHEAD);
    barrier();
    if (chunk + 1 < K_CHUNKS) {
        hold_k(now, chunk + 1);
    } else {
        hold_v(0);
    }
    score_keys(chunk);
}

void use_v(uint chunk, uint n_valid) {
    if (chunk > 0) barrier();
    store_v(chunk, 0, n_valid);
    barrier();
    if (chunk + 1 < V_CHUNKS) {
        hold_v(chunk + 1);
    } else {
        hold_k(next, 0);
    }
    add_values(chunk);
}

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint tiles = (group + TQ - 1) / TQ;
    own_head = gl_WorkGroupID.y / tiles;
    const uint first_in_group = gl_WorkGroupID.y % tiles * TQ;
    first_head = int(own_head * group + first_in_group) - int(q_first);
    begin_head = uint(max(-first_head, 0));
    end_head = uint(clamp(int(n_heads) - first_head, 0, int(min(TQ, group - first_in_group))));
    if (begin_head >= end_head) return; // another device has this tile's heads

    const uvec2 place_of_row = step_place(gl_WorkGroupID.x);
    if (place_of_row.x < DENSE && gl_WorkGroupID.x < step_n_rows()) return;
    slot = place_of_row.y;
    list = gl_WorkGroupID.x * n_lists + (n_lists == 1 ? 0 : own_head);
    n_keys = n_chosen_keys(gl_WorkGroupID.x, place_of_row.x);
    const uint n_blocks = (n_keys + CELL_BLOCK - 1) / CELL_BLOCK;
    const uint per_split = (n_blocks + n_splits - 1) / n_splits;
    first_block = gl_WorkGroupID.z * per_split;
    end_block = min(first_block + per_split, n_blocks);

    for (uint e = thread; e < TQ * K_QUADS; e += LOCAL) {
        const uint row = e / K_QUADS;
        vec4 value = vec4(0.0);
        if (is_here(row)) {
            const uint from = q_off + index_of(row) * HEAD_K + 4 * (e % K_QUADS);
            value = vec4(q[from], q[from + 1], q[from + 2], q[from + 3]);
        }
        q_tile[row * Q_STRIDE + e % K_QUADS] = half_quad(K_CODES ? value.xzyw : value);
    }
    k_stride = place(n_kv * K_PIECES, K_CODES);
    v_stride = place(n_kv * V_PIECES, V_CODES);
    clear_sums();
    if (first_block < end_block) {
        find_cells(first_block);
        barrier();
        hold_k(0, 0);
    }

    for (uint block = first_block; block < end_block; ++block) {
        const uint block_pos = block * CELL_BLOCK;
        const uint n_valid = min(n_keys - block_pos, CELL_BLOCK);
        now = cells_of(block);
        next = cells_of(min(block + 1, end_block - 1));
        // Compilers do not unroll a loop that contains loops.
        use_k(block, 0);
        if (K_CHUNKS > 1) use_k(block, 1);
        if (K_CHUNKS > 2) use_k(block, 2);
        if (K_CHUNKS > 3) use_k(block, 3);
        barrier();
        weigh_keys(block_pos, 0, n_keys - 1);
        use_v(0, n_valid);
        if (V_CHUNKS > 1) use_v(1, n_valid);
        if (V_CHUNKS > 2) {
            use_v(2, n_valid);
            use_v(3, n_valid);
        }
    }
    join_sums();
    const uint row = row_of_tile();
    if (FINAL == 0 && key_part() == 0 && is_here(row)) {
        part[result_of(row) + HEAD_V] = m;
        part[result_of(row) + HEAD_V + 1] = l;
    }
    put_results(FINAL == 0 ? 1.0 : l > 0.0 ? 1.0 / l : 0.0);
}
