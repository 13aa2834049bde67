#version 450
#extension GL_GOOGLE_include_directive : require
// For each row, read a cell of a KV cache as f32. StepParams' field `token` has the cell's position. The
// first n_rot dimensions of a head are rotated. The next op stores the row at the row's position. A thread
// computes four elements.
#include "lib/types.glsl"
#include "lib/cache_types.glsl"
#include "lib/iq4_values.glsl"

layout(constant_id = 1) const uint TYPE = 1;

layout(push_constant) uniform Push {
    uint cache_off, cells_off, cos_sin_off, y_off;
    uint width, n_rows, blocks_per_slot, head_dim, n_rot, half_split;
};
layout(set = 0, binding = 0) readonly buffer Cache { uint cache[]; };
layout(set = 0, binding = 1) readonly buffer Cells { uint cells[]; };
layout(set = 0, binding = 2) readonly buffer CosSin { float cos_sin[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };

#define STEP_BINDING 4
#include "lib/step.glsl"
#include "lib/step_rows.glsl"
#include "lib/cells.glsl"

#define CACHE(i) cache[i]
#define CACHE_OFF cache_off
#define CACHE_TYPE TYPE
#define CACHE_QUAD cache_quad
#define CACHE_BLOCK_QUAD cache_block_quad
#include "lib/cache.glsl"

void main() {
    const uint row = gl_WorkGroupID.z;
    const uint quad = global_index();
    if (row >= step_n_rows_from_buffer() || 4 * quad >= width) return;
    const uvec4 source = step_rows.rows[row];
    const uint cell = block_cell(source.y, source.z / CELL_BLOCK) + source.z % CELL_BLOCK;
    const uint first = cell * (width / 4);
    const vec4 own = cache_quad(first + quad);
    const uint gap = half_split != 0 ? n_rot / 2 : 1;
    for (uint j = 0; j < 4; ++j) {
        const uint e = 4 * quad + j;
        const uint i = e % head_dim;
        float value = own[j];
        if (i < n_rot) {
            const bool is_second = half_split != 0 ? i >= gap : (i & 1u) != 0;
            const uint other = is_second ? e - gap : e + gap;
            const float partner = other / 4 == quad ? own[other % 4] : cache_quad(first + other / 4)[other % 4];
            const uint pair = half_split != 0 ? i % gap : i / 2;
            const uint at = cos_sin_off + row * n_rot + 2 * pair;
            value = value * cos_sin[at] + (is_second ? partner : -partner) * cos_sin[at + 1];
        }
        y[y_off + row * width + e] = value;
    }
}
