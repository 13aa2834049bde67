#version 450
#extension GL_GOOGLE_include_directive : require
// Like attn_decode, but each row attends only to the blocks of positions that index_top_k chose. A row has
// one list of blocks for all kv heads, or one for each. The shader looks up the cells of 32 positions at
// once. A row outside all runs gets zeros.
#include "lib/types.glsl"

layout(constant_id = 1) const uint HEAD_K = 64;
layout(constant_id = 2) const uint HEAD_V = 64;
layout(constant_id = 3) const uint HEADS = 1;
layout(constant_id = 4) const uint K_TYPE = 1;
layout(constant_id = 5) const uint V_TYPE = 1;
layout(constant_id = 6) const uint FINAL = 0;
layout(constant_id = 7) const uint BATCH = 1;
const uint ROWS = 1; // rows attend to different positions

layout(push_constant) uniform Push {
    uint q_off, k_off, v_off, cells_off, chosen_off, part_off;
    uint n_heads, n_kv, group, q_first, n_rows, blocks_per_slot, n_splits, n_chosen, n_lists, block_size, tail;
    float scale;
};
layout(set = 0, binding = 0) readonly buffer Q { float q[]; };
layout(set = 0, binding = 1) readonly buffer K { uint k[]; };
layout(set = 0, binding = 2) readonly buffer V { uint v[]; };
layout(set = 0, binding = 3) readonly buffer Cells { uint cells[]; };
layout(set = 0, binding = 4) readonly buffer Chosen { uint chosen[]; };
layout(set = 0, binding = 5) writeonly buffer Part { float part[]; };

#define STEP_BINDING 6
#include "lib/step.glsl"
#include "lib/step_rows.glsl"
#include "lib/cells.glsl"
#include "lib/chosen_keys.glsl"
#include "lib/kv_quads.glsl"

shared uint key_cells[2 * CELL_BLOCK]; // cells of this block and the previous block
uint half_of; // index of this block's first cell in key_cells

uint n_keys_of(uint row, uint pos) { return n_chosen_keys(row, pos); }

uint first_key_of(uint n_keys) { return 0; }

bool in_window(uint key_pos, uint n_keys) { return true; }

bool begin_together(uint first_key, uint other_first_key) { return true; }

// Fill an incomplete last block with copies of the last position.
void open_block(uint slot, uint block, uint n_keys) {
    half_of = block % 2 * CELL_BLOCK;
    for (uint j = gl_LocalInvocationID.x; j < CELL_BLOCK; j += LOCAL) {
        const uint at = min(block * CELL_BLOCK + j, n_keys - 1);
        const uint of_head = n_lists == 1 ? 0 : gl_WorkGroupID.y / ((group + HEADS - 1) / HEADS); // the kv head
        const uint list = gl_WorkGroupID.x * n_lists + of_head;
        const uint position = chosen_position(list, at);
        key_cells[half_of + j] = block_cell(slot, position / CELL_BLOCK) + position % CELL_BLOCK;
    }
    barrier();
}

uint cell_of(uint j) { return key_cells[half_of + j]; }

float changed(float score, uint a, uint key) { return score; }

float inverse_sum(float m, float sum, uint head) { return 1.0 / sum; }

#include "lib/row_attention.glsl"
