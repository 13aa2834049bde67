#version 450
#extension GL_GOOGLE_include_directive : require
// y[r] is the row before row r in its sequence: x[r - 1] within a run, or the slot's kept row for a run's
// first row (keep_rows.comp). Rows at position 0 and rows that the step does not have are zeros.
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
