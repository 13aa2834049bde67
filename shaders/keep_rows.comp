#version 450
#extension GL_GOOGLE_include_directive : require
// Store the last n_kept rows of each run of x: kept[slot, position % n_kept] = x[r]. A slot has at most one run
// in a step.
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint x_off, kept_off;
    uint n, n_rows, n_kept;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) writeonly buffer Kept { float kept[]; };

#define STEP_BINDING 2
#include "lib/step.glsl"
#include "lib/step_rows.glsl"

void main() {
    const uint row = gl_WorkGroupID.z;
    const uint i = global_index();
    const uint end = min(step_n_rows_from_buffer(), n_rows);
    if (i >= n || row >= end) return;
    const uint slot = step_place(row).y;
    if (row + n_kept < end && step_place(row + n_kept).y == slot) return; // for a later row
    kept[kept_off + (slot * n_kept + step_position(row) % n_kept) * n + i] = x[x_off + row * n + i];
}
