#version 450
#extension GL_GOOGLE_include_directive : require
// Look up rows of the table: y[r] = w[id(r)], or zeros if row r or its id does not exist. The id is the token
// of row r (ids = 0), the row index of output r (1), the position of row r (2), the type of row r (3), or
// chosen[r] (4). The buffer w holds one piece of the table, beginning at row `first`. Pieces are dispatched
// in order, and only the first piece writes zeros.
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint w_off, chosen_off, y_off;
    uint n_embd, n_vocab, n_rows, ids, first;
};
layout(set = 0, binding = 0) readonly buffer W { uint w[]; };
layout(set = 0, binding = 1) readonly buffer Chosen { uint chosen[]; };
layout(set = 0, binding = 2) writeonly buffer Y { float y[]; };

#define STEP_BINDING 3
#include "lib/step.glsl"
#include "lib/step_rows.glsl"
#include "lib/dequant.glsl"

void main() {
    const uint row = gl_WorkGroupID.z;
    const uint k = 4 * global_index();
    if (k >= n_embd) return;
    const uint n_ids = ids == 4 ? n_rows : ids == 1 ? step_n_outputs() : step_n_rows();
    uint id;
    if (ids == 4) {
        id = chosen[chosen_off + row];
    } else {
        const uvec4 of_row = step_rows.rows[row];
        id = ids == 1 ? of_row.w & 0xffffu : ids == 0 ? of_row.z : ids == 2 ? of_row.x : of_row.w >> 16;
    }
    const bool found = row < n_ids && id >= first && id - first < n_vocab;
    if (!found && first > 0) return;
    vec4 value = vec4(0.0);
    if (found) value = dequant4_tail(row_start(id - first, n_embd), k, n_embd);
    for (uint i = 0; i < 4 && k + i < n_embd; ++i) y[y_off + row * n_embd + k + i] = value[i];
}
