#version 450
#extension GL_GOOGLE_include_directive : require
// Write to y[r] the row before row r in its sequence. For the first row of a run, this is the slot's kept row
// (keep_rows.comp), otherwise x[r - 1]. If row r is at position 0 or the step does not have it, y[r] is
// zeros.
#include "lib/types.glsl"

layout(constant_id = 1) const uint HAS_X = 1; // 0: every run has one row

layout(push_constant) uniform Push {
    uint x_off, kept_off, y_off;
    uint n, n_rows, n_kept;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer Kept { float kept[]; };
layout(set = 0, binding = 2) writeonly buffer Y { float y[]; };

#define STEP_BINDING 3
#include "lib/step.glsl"
#include "lib/step_rows.glsl"

void main() {
    const uint row = gl_WorkGroupID.z;
    const uint i = global_index();
    if (i >= n) return;
    float value = 0.0;
    if (row < step_n_rows_from_buffer() && step_position(row) > 0) {
        const uint slot = step_place(row).y;
        if (HAS_X != 0 && row > 0 && step_place(row - 1).y == slot) {
            value = x[x_off + (row - 1) * n + i];
        } else {
            value = kept[kept_off + (slot * n_kept + (step_position(row) - 1) % n_kept) * n + i];
        }
    }
    y[y_off + row * n + i] = value;
}
