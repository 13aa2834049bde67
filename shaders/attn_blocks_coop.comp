#version 450
#extension GL_GOOGLE_include_directive : require
// Compute attn_chosen on matrix units (lib/unit_attention.glsl) for lists of blocks of LIST_BLOCK positions, a
// multiple of CELL_BLOCK. A tile's rows are HEADS q heads of ROWS consecutive rows. The tile reads each block that
// one of its rows has chosen once, and masks it for the other rows. A masked block adds zeros, so a row's bits do
// not depend on the tile's other rows. With ROWS > 1, the shader computes rows at positions below JOINT, which is
// at most 32 * LIST_BLOCK, and with ROWS == 1 the other rows.
#include "lib/types.glsl"

layout(constant_id = 1) const uint UNIT_M = 16; // see attn_decode_coop.comp
layout(constant_id = 2) const uint UNIT_N = 16;
layout(constant_id = 3) const uint UNIT_K = 16;
layout(constant_id = 4) const uint LANES = 32;
layout(constant_id = 5) const uint ROW_GROUPS = 1;
layout(constant_id = 6) const uint V_PARTS = 2;
layout(constant_id = 7) const uint UNROLL = 1;
layout(constant_id = 8) const uint SCORE_UNROLL = 1; // of the products of q and K
layout(constant_id = 9) const uint HEAD_K = 64;
layout(constant_id = 10) const uint HEAD_V = 64;
layout(constant_id = 11) const uint K_TYPE = 1;
layout(constant_id = 12) const uint V_TYPE = 1;
layout(constant_id = 13) const uint FINAL = 0;
layout(constant_id = 14) const uint ROWS = 1;
layout(constant_id = 15) const uint LIST_BLOCK = 128;
layout(constant_id = 16) const uint JOINT = 0;
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
#include "lib/kv_quads.glsl"
#include "lib/tanh.glsl"
const uint HAS_SOFTCAP = 0;
const float softcap = 0.0;
const uint K_CHUNKS = 1;
const uint V_CHUNKS = 1;
const uint DIM_PARTS = 1;
// `end` is a signed number: the invocation's last key that its row attends to, counted from its first key.
#define MASKED(i, key_pos, begin, end) (int(i) > int(end))
#include "lib/unit_attention.glsl"
const bool KEEPS = true;
#include "lib/unit_pieces.glsl"
#include "lib/unit_blocks.glsl"

const uint HEADS = TQ / ROWS;
const uint PER = LIST_BLOCK / CELL_BLOCK;
// Whether K of the next block is read while a block is computed. In a large tile, it would exceed RADV's registers.
const bool K_AHEAD = ROWS == 1;

shared uint chosen_of[ROWS]; // bit b: the row has chosen block b

int first_head; // see attn_decode_coop.comp
uint begin_head, end_head;
uint n_tile_rows;

// As in lib/row_tile.glsl, a tile's queries are the heads of its first row, then the heads of its next row.
uint row_of(uint query) { return ROWS == 1 ? 0 : query / HEADS; }

uint head_of(uint query) { return ROWS == 1 ? query : query % HEADS; }

bool is_here(uint query) {
    const uint head = head_of(query);
    const bool is_head = head >= begin_head && head < end_head;
    return is_head && (ROWS == 1 || row_of(query) < n_tile_rows);
}

uint index_of(uint query) { return (gl_WorkGroupID.x + row_of(query)) * n_heads + uint(first_head + int(head_of(query))); }

uint result_of(uint query) {
    const uint index = index_of(query);
    return part_off + (FINAL != 0 ? index * HEAD_V : (index * n_splits + gl_WorkGroupID.z) * (HEAD_V + 2));
}

float bias_of(uint key_pos) { return 0.0; }

void put(uint query, uint d, float value) {
    if (is_here(query)) part[result_of(query) + d] = value;
}

bool continues(uint row) { return row % ROWS != 0 && step_place(row) == step_place(row - 1) + uvec2(1, 0); }

// Return the rows of the tile that begins with `row`, or 0 if no tile begins there.
uint rows_from(uint row) {
    const uint end = min(n_rows, step_n_rows());
    if (ROWS == 1) return row < end && step_position(row) < JOINT ? 0 : 1;
    if (row >= end || step_position(row) >= JOINT || continues(row)) return 0;
    uint n = 1;
    while (n < ROWS && row + n < end && step_position(row) + n < JOINT && continues(row + n)) ++n;
    return n;
}

// Return the blocks in the list of a row. With `tail`, the row's own block is in it only if it is incomplete.
uint n_listed(uint pos) {
    if (tail == 0) return min(n_chosen, pos / LIST_BLOCK + 1);
    return min(n_chosen - 1, (pos + 1) / LIST_BLOCK) + uint((pos + 1) % LIST_BLOCK != 0);
}

uint n_keys_of(uint pos) {
    const uint in_own = tail != 0 ? (pos + 1) % LIST_BLOCK : pos % LIST_BLOCK + 1;
    return min(pos + 1, (n_chosen - 1) * LIST_BLOCK + in_own);
}

// Return the first cell of a block. A slot has cells for all positions, so it is no ring.
uint cell_of(uint slot, uint block) { return cells[cells_off + slot * blocks_per_slot + block] * CELL_BLOCK; }

// Collect the blocks of each row of the tile. Return the blocks that any row has chosen.
uint collect(uint list, uint first_pos) {
    for (uint row = gl_LocalInvocationID.x; row < ROWS; row += LOCAL) chosen_of[row] = 0;
    barrier();
    [[unroll]] for (uint e = gl_LocalInvocationID.x; e < ROWS * 32; e += LOCAL) {
        const uint row = e / 32;
        if (row < n_tile_rows && e % 32 < n_listed(first_pos + row)) {
            atomicOr(chosen_of[row], 1u << chosen[list + row * n_lists * n_chosen + e % 32]);
        }
    }
    barrier();
    uint all = 0;
    [[unroll]] for (uint row = 0; row < ROWS; ++row) all |= chosen_of[row];
    return all;
}

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint tiles = (group + HEADS - 1) / HEADS;
    const uint kv_head = gl_WorkGroupID.y / tiles;
    const uint first_in_group = gl_WorkGroupID.y % tiles * HEADS;
    const uint step_row = gl_WorkGroupID.x;
    n_tile_rows = rows_from(step_row);
    if (n_tile_rows == 0) return;
    first_head = int(kv_head * group + first_in_group) - int(q_first);
    begin_head = uint(max(-first_head, 0));
    end_head = uint(clamp(int(n_heads) - first_head, 0, int(min(HEADS, group - first_in_group))));
    if (begin_head >= end_head) return; // another device has this tile's heads

    const uvec2 place = step_place(step_row);
    const uint slot = place.y;
    const uint last_pos = place.x + n_tile_rows - 1;
    const uint list = chosen_off + (step_row * n_lists + (n_lists == 1 ? 0 : kv_head)) * n_chosen;
    uint rest = 0; // the tile's blocks from the current one on
    uint first = 0, end = 0; // of the tile's blocks of CELL_BLOCK positions
    if (ROWS == 1) {
        const uint n_keys = step_row < step_n_rows() ? n_keys_of(place.x) : 0;
        const uint n_blocks = (n_keys + CELL_BLOCK - 1) / CELL_BLOCK;
        const uint per_split = (n_blocks + n_splits - 1) / n_splits;
        first = gl_WorkGroupID.z * per_split;
        end = min(first + per_split, n_blocks);
    } else {
        rest = collect(list, place.x);
        const uint last = findMSB(rest) * PER;
        end = (bitCount(rest) - 1) * PER + min(PER, last_pos / CELL_BLOCK - last + 1);
    }

    for (uint e = thread; e < TQ * K_QUADS; e += LOCAL) {
        const uint query = e / K_QUADS;
        vec4 value = vec4(0.0);
        if (is_here(query)) {
            const uint at = q_off + index_of(query) * HEAD_K + 4 * (e % K_QUADS);
            value = vec4(q[at], q[at + 1], q[at + 2], q[at + 3]);
        }
        q_tile[query * Q_STRIDE + e % K_QUADS] = half_quad(K_CODES ? value.xzyw : value);
    }
    clear_sums();
    find_places(kv_head);
    uint block = 0, cell = 0;
    if (first < end) {
        block = ROWS == 1 ? chosen[list + first / PER] * PER + first % PER : findLSB(rest) * PER;
        cell = cell_of(slot, block);
        if (K_AHEAD) hold_k(cell, 0);
    }
    const uint own_row = row_of(row_of_tile());
    const uint own_chosen = ROWS == 1 ? 0 : chosen_of[own_row];
    const int own_end = int(place.x + own_row) - int(key_part() * EACH);

    for (uint i = first; i < end; ++i) {
        const uint block_pos = block * CELL_BLOCK;
        const bool is_chosen = ROWS == 1 || (own_chosen >> block / PER & 1u) != 0;
        barrier(); // all threads have multiplied V of the previous block
        if (!K_AHEAD) hold_k(cell, 0);
        store_k(0);
        barrier();
        hold_v(cell, 0);
        if (i + 1 < end) {
            if (ROWS == 1) {
                block = chosen[list + (i + 1) / PER] * PER + (i + 1) % PER;
            } else if (block % PER < PER - 1) {
                ++block;
            } else {
                rest &= rest - 1;
                block = findLSB(rest) * PER;
            }
            cell = cell_of(slot, block);
        }
        if (K_AHEAD) hold_k(cell, 0);
        score_keys(0);
        barrier();
        weigh_keys(block_pos, 0, is_chosen ? uint(own_end - int(block_pos)) : 0xffffffffu);
        store_v(0, 0, min(last_pos + 1 - block_pos, CELL_BLOCK));
        barrier();
        add_values(0);
    }
    join_sums();
    const uint query = row_of_tile();
    if (FINAL == 0 && key_part() == 0 && is_here(query)) {
        part[result_of(query) + HEAD_V] = m;
        part[result_of(query) + HEAD_V + 1] = l;
    }
    put_results(FINAL == 0 ? 1.0 : l > 0.0 ? 1.0 / l : 0.0);
}
