#version 450
#extension GL_GOOGLE_include_directive : require
// Like attn_chosen, but each row attends to the last positions and to entries. The vector of a position is both key
// and value. Entries follow the vectors in the cache, from cell `first_entry` on, and have another cell table. A row's keys are the chosen entries (all if n_chosen is 0), then `window`
// positions. A row outside all runs gets zeros.
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
    uint q_off, k_off, v_off, cells_off, entry_cells_off, chosen_off, part_off;
    uint n_heads, n_kv, group, q_first, n_rows, blocks_per_slot, n_splits, n_chosen;
    uint block_size, cells_per_block, first_entry, window;
    float scale;
};
layout(set = 0, binding = 0) readonly buffer Q { float q[]; };
layout(set = 0, binding = 1) readonly buffer K { uint k[]; };
layout(set = 0, binding = 2) readonly buffer V { uint v[]; };
layout(set = 0, binding = 3) readonly buffer Cells { uint cells[]; };
layout(set = 0, binding = 4) readonly buffer EntryCells { uint entry_cells[]; };
layout(set = 0, binding = 5) readonly buffer Chosen { uint chosen[]; };
layout(set = 0, binding = 6) writeonly buffer Part { float part[]; };

#define STEP_BINDING 7
#include "lib/step.glsl"
#include "lib/step_rows.glsl"
#include "lib/cells.glsl"
#include "lib/kv_quads.glsl"

shared uint key_cells[2 * CELL_BLOCK]; // cells of this block and the previous block
uint half_of; // index of this block's first cell in key_cells

uint n_entries_of(uint pos) {
    const uint n_complete = (pos + 1) / block_size;
    return n_chosen == 0 ? n_complete : min(n_complete, n_chosen - 1);
}

uint n_keys_of(uint row, uint pos) {
    return row < step_n_rows() ? n_entries_of(pos) + min(pos + 1, window) : 0;
}

uint first_key_of(uint n_keys) { return 0; }

bool in_window(uint key_pos, uint n_keys) { return true; }

bool begin_together(uint first_key, uint other_first_key) { return true; }

// Fill an incomplete last block with copies of the last position.
void open_block(uint slot, uint block, uint n_keys) {
    half_of = block % 2 * CELL_BLOCK;
    const uint pos = step_place(gl_WorkGroupID.x).x;
    const uint n_entries = n_entries_of(pos);
    for (uint j = gl_LocalInvocationID.x; j < CELL_BLOCK; j += LOCAL) {
        const uint at = min(block * CELL_BLOCK + j, n_keys - 1);
        uint position = pos + 1 - n_keys + at;
        uint cell;
        if (at < n_entries) {
            uint of_block = at;
            if (n_chosen != 0) of_block = chosen[chosen_off + gl_WorkGroupID.x * n_chosen + at];
            position = (of_block + 1) * block_size - 1;
            const uint in_table = slot * blocks_per_slot + position / CELL_BLOCK % blocks_per_slot;
            const uint of_entries = entry_cells[entry_cells_off + in_table];
            cell = first_entry + cell_in_block(of_entries, position, block_size, cells_per_block);
        } else {
            cell = block_cell(slot, position / CELL_BLOCK) + position % CELL_BLOCK;
        }
        key_cells[half_of + j] = cell;
    }
    barrier();
}

uint cell_of(uint j) { return key_cells[half_of + j]; }

float changed(float score, uint a, uint key) { return score; }

float inverse_sum(float m, float sum, uint head) { return 1.0 / sum; }

#include "lib/row_attention.glsl"
