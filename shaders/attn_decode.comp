#version 450
#extension GL_GOOGLE_include_directive : require
// Compute the attention of rows over one split of their keys (lib/row_attention.glsl). The shader writes
// zeros to rows of longer runs, and attn_prefill overwrites them later.
#include "lib/types.glsl"

layout(constant_id = 1) const uint HEAD_K = 64;
layout(constant_id = 2) const uint HEAD_V = 64;
layout(constant_id = 3) const uint HEADS = 1;
layout(constant_id = 4) const uint K_TYPE = 1;
layout(constant_id = 5) const uint V_TYPE = 1;
layout(constant_id = 6) const uint FINAL = 0;
layout(constant_id = 7) const uint HAS_SINKS = 0; // used with FINAL
layout(constant_id = 8) const uint BATCH = 1; // quads in flight
layout(constant_id = 9) const uint ROWS = 1; // rows of a run per workgroup
layout(constant_id = 10) const uint FIRST = 0; // first position that rows attend to
layout(constant_id = 11) const uint HAS_SLOPES = 0;

layout(push_constant) uniform Push {
    uint q_off, k_off, v_off, cells_off, sinks_off, slopes_off, part_off;
    uint n_heads, n_kv, group, q_first, n_rows, blocks_per_slot, n_splits, window, chunk;
    float scale, softcap;
};
layout(set = 0, binding = 0) readonly buffer Q { float q[]; };
layout(set = 0, binding = 1) readonly buffer K { uint k[]; };
layout(set = 0, binding = 2) readonly buffer V { uint v[]; };
layout(set = 0, binding = 3) readonly buffer Cells { uint cells[]; };
layout(set = 0, binding = 4) readonly buffer Sinks { float sinks[]; };
layout(set = 0, binding = 5) readonly buffer Slopes { float slopes[]; };
layout(set = 0, binding = 6) writeonly buffer Part { float part[]; };

#define STEP_BINDING 7
#include "lib/step.glsl"
#include "lib/step_rows.glsl"
#include "lib/cells.glsl"
#include "lib/kv_quads.glsl"
#include "lib/tanh.glsl"
#include "lib/sinks.glsl"

uint n_keys_of(uint row, uint pos) { return row < step_n_decode() ? pos + 1 : 0; }

#define FIRST_KEY FIRST
#include "lib/window.glsl"

uint cell; // cell of the block's first key

void open_block(uint slot, uint block, uint n_keys) { cell = block_cell(slot, block); }

uint cell_of(uint j) { return cell + j; }

#include "lib/row_attention.glsl"

float changed(float score, uint a, uint key) {
    const float capped = soft_cap(score, softcap);
    if (HAS_SLOPES == 0) return capped;
    const uint head = uint(clamp(first_head + int(head_of(a)), 0, int(n_heads) - 1));
    return capped - slopes[slopes_off + head] * float(n_keys - 1 + row_of(a) - block_pos - key);
}
