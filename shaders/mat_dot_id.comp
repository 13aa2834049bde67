#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require
// Compute mat_vec_id with x in 8 bits.
#include "lib/types.glsl"

layout(constant_id = 1) const uint ROWS = 8; // rows of W_e per workgroup, an even number
layout(constant_id = 2) const uint AXIS = 0; // see lib/expert.glsl

layout(push_constant) uniform Push {
    uint w_off, x_off, ids_off, starts_off, y_off;
    uint side, first, count, n_used, n_rows, x_stride, y_stride, x_per_used;
};
layout(set = 0, binding = 0) readonly buffer W { uint w[]; };
layout(set = 0, binding = 1) readonly buffer X { uint x[]; };
layout(set = 0, binding = 2) readonly buffer Ids { uint ids[]; };
layout(set = 0, binding = 3) readonly buffer Starts { uint starts[]; };
layout(set = 0, binding = 4) writeonly buffer Y { float y[]; };
#include "lib/dequant.glsl"
#include "lib/expert.glsl"
#include "lib/q8.glsl"
#include "lib/quants.glsl"

void main() {
    const uint pair = gl_WorkGroupID.z; // (row, used expert)
    const uint first_row = group_index() * ROWS;
    const uint expert = ids[ids_off + pair];
    if (expert - first >= count) return; // the expert is in another piece of the stack
    const uint s = starts_off;
    const Expert e = expert_of(starts[s + expert], starts[s + expert + 1], starts[s + first]);
    if (first_row >= e.n) return;
    const uint end = min(first_row + ROWS, e.n);
    const uint x_row = x_off + (x_per_used != 0 ? pair : pair / n_used) * q8_row_words(x_stride);

    for (uint row = first_row + 2 * gl_SubgroupID; row < end; row += 2 * gl_NumSubgroups) {
        const uint start0 = expert_row(e, row);
        const uint start1 = expert_row(e, min(row + 1, e.n - 1));
        vec2 sum = vec2(0.0);
        for (uint base = 0; base < e.k; base += GROUP * gl_SubgroupSize) {
            const bool inside = base + GROUP * gl_SubgroupInvocationID < e.k;
            const uint i = inside ? base + GROUP * gl_SubgroupInvocationID : 0;
            uvec4 codes[GROUP / 16];
            [[unroll]] for (uint c = 0; c < GROUP / 16; ++c) {
                const uint at = x_row + i / 4 + 4 * c;
                codes[c] = uvec4(x[at], x[at + 1], x[at + 2], x[at + 3]);
            }
            const uint block = x_row + q8_block(x_stride, i);
            const int x_sum = group_sum(x[block + 1], i);
            const vec2 products = vec2(
                product(group_at(start0, i), codes, x_sum), product(group_at(start1, i), codes, x_sum)
            );
            sum += (inside ? uintBitsToFloat(x[block]) : 0.0) * products;
        }
        const vec2 total = subgroupAdd(sum);
        if (gl_SubgroupInvocationID == 0) {
            y[y_off + pair * y_stride + row] = total.x;
            if (row + 1 < end) y[y_off + pair * y_stride + row + 1] = total.y;
        }
    }
}
