#version 450
#extension GL_GOOGLE_include_directive : require
// cache[cell of the row's position] = x[row]; two elements per thread, so an f16 pair is one word with one writer.
#include "lib/types.glsl"
#include "lib/half.glsl"

layout(push_constant) uniform Push {
    uint x_off, cells_off, cache_off;
    uint width, n_rows, blocks_per_slot;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer Cells { uint cells[]; };
layout(set = 0, binding = 2) writeonly buffer Cache { uint cache[]; };

#define STEP_BINDING 3
#include "lib/step.glsl"
#include "lib/cells.glsl"

void main() {
    const uint row = gl_WorkGroupID.z;
    const uint pair = global_index();
    if (row >= step_n_rows() || 2 * pair >= width) return;
    const uint pos = step_params.rows[row].x;
    const uint cell = block_cell(step_params.rows[row].y, pos / CELL_BLOCK) + pos % CELL_BLOCK;
    const uint from = x_off + row * width + 2 * pair;
#ifdef TYPE_F16
    cache[cache_off + cell * (width / 2) + pair] = half_bits(x[from]) | (half_bits(x[from + 1]) << 16);
#else
    const uint to = cache_off + cell * width + 2 * pair;
    cache[to] = floatBitsToUint(x[from]);
    cache[to + 1] = floatBitsToUint(x[from + 1]);
#endif
}
