#version 450
#extension GL_GOOGLE_include_directive : require
// For each row at the last position of a block of `block_size` positions, compute the mean of the block's
// keys. Other rows get zeros. If GATED, the mean is weighted by gates, which follow the keys in `k`. If
// SERIES is 2, a cell has two keys and two gates (vkbackend/ops/chosen.py). The workgroup ID is (LOCAL quads,
// -, row).
#include "lib/types.glsl"
#include "lib/cache_types.glsl"
#include "lib/iq4_values.glsl"

layout(constant_id = 1) const uint HEAD = 128;
layout(constant_id = 2) const uint K_TYPE = 1;
layout(constant_id = 3) const uint GATED = 1;
layout(constant_id = 4) const uint SERIES = 1;

layout(push_constant) uniform Push {
    uint k_off, cells_off, bias_off, y_off;
    uint n_rows, blocks_per_slot, block_size, cell_quads, first_quad;
};
layout(set = 0, binding = 0) readonly buffer K { uint k[]; };
layout(set = 0, binding = 1) readonly buffer Cells { uint cells[]; };
layout(set = 0, binding = 2) readonly buffer Bias { float bias[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };

#define STEP_BINDING 4
#include "lib/step.glsl"
#include "lib/step_rows.glsl"
#include "lib/cells.glsl"
#define CACHE(i) k[i]
#define CACHE_OFF k_off
#define CACHE_TYPE K_TYPE
#define CACHE_QUAD k_quad
#define CACHE_BLOCK_QUAD k_block_quad
#include "lib/cache.glsl"

const uint QUADS = HEAD / 4;

void main() {
    const uint row = gl_WorkGroupID.z;
    const uint quad = gl_WorkGroupID.x * LOCAL + gl_LocalInvocationID.x;
    if (quad >= QUADS) return;
    vec4 sum = vec4(0.0);
    vec4 total = vec4(1.0);
    const uvec2 place = row < step_n_rows_from_buffer() ? step_place(row) : uvec2(0);
    const uint end = place.x + 1;
    if (row < step_n_rows_from_buffer() && end % block_size == 0) {
        total = vec4(0.0);
        vec4 top = vec4(NEG_LARGE);
        const uint n = min(SERIES * block_size, end);
        for (uint back = n; back > 0; --back) {
            const uint position = end - back;
            const uint series = SERIES > 1 && back <= block_size ? 1 : 0;
            const uint cell = block_cell(place.y, position / CELL_BLOCK) + position % CELL_BLOCK;
            const uint key = cell * cell_quads + first_quad + series * QUADS + quad;
            const uint at = bias_off + (position % block_size * SERIES + series) * HEAD + 4 * quad;
            vec4 gate = vec4(0.0);
            if (GATED != 0) gate = k_quad(key + SERIES * QUADS) + vec4(bias[at], bias[at + 1], bias[at + 2], bias[at + 3]);
            const vec4 top_new = max(top, gate);
            const vec4 rescale = exp(top - top_new);
            const vec4 weight = exp(gate - top_new);
            sum = sum * rescale + weight * k_quad(key);
            total = total * rescale + weight;
            top = top_new;
        }
    }
    const vec4 result = sum / total;
    [[unroll]] for (uint c = 0; c < 4; ++c) y[y_off + row * HEAD + 4 * quad + c] = result[c];
}
