#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require
// y[r, i] = sum over k of w[i, k] * x[r, k] (+ b[i]) for the N rows of x, in 8 bits: dot products of integers. A subgroup
// has two rows of w at a time, its threads 16 elements of each, which share a scale; sums meet in the subgroup.
#include "lib/types.glsl"

layout(constant_id = 1) const uint ROWS = 8; // rows of w per workgroup, even
layout(constant_id = 2) const uint N = 1; // 1..8

layout(push_constant) uniform Push {
    uint w_off, x_off, b_off, y_off;
    uint k, n, n_rows, y_stride, has_bias, act, up_at;
};
layout(set = 0, binding = 0) readonly buffer W { uint w[]; };
layout(set = 0, binding = 1) readonly buffer X { uint x[]; };
layout(set = 0, binding = 2) readonly buffer B { float b[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };
#include "lib/dequant.glsl"
#include "lib/glu.glsl"
#include "lib/q8.glsl"
#include "lib/quants.glsl"

void main() {
    const uint lane = gl_SubgroupInvocationID;
    const uint first = group_index() * ROWS;
    const uint end = min(first + ROWS, act == 0 ? n : 2 * n); // with act the two rows are one of gate, and that of up
    for (uint row = first + 2 * gl_SubgroupID; row < end; row += 2 * gl_NumSubgroups) {
        const uint start0 = row_start(act == 0 ? row : row / 2, k);
        const uint start1 = act == 0 ? row_start(min(row + 1, n - 1), k) : start0 + 4 * up_at;
        vec2 sum[N];
        [[unroll]] for (uint r = 0; r < N; ++r) sum[r] = vec2(0.0);
        for (uint i = 16 * lane; i < k; i += 16 * gl_SubgroupSize) {
            const Quants q0 = quants16(start0, i);
            const Quants q1 = quants16(start1, i);
            [[unroll]] for (uint r = 0; r < N; ++r) {
                const uint x_row = x_off + r * q8_row_words(k);
                const uint at = x_row + i / 4;
                const uvec4 codes = uvec4(x[at], x[at + 1], x[at + 2], x[at + 3]);
                const float d = uintBitsToFloat(x[x_row + q8_block(k, i)]);
                const int x_sum = q8_sum16(x[x_row + q8_block(k, i) + 1], i);
                sum[r] += d * vec2(product16(q0, codes, x_sum), product16(q1, codes, x_sum));
            }
        }
        vec2 bias = vec2(0.0);
        if (has_bias != 0) bias = vec2(b[b_off + row], b[b_off + min(row + 1, n - 1)]);
        [[unroll]] for (uint r = 0; r < N; ++r) {
            const vec2 total = subgroupAdd(sum[r]) + bias;
            if (lane == 0 && act != 0) {
                y[y_off + r * y_stride + row / 2] = glu_value(act - 1, total.x, total.y);
            } else if (lane == 0) {
                y[y_off + r * y_stride + row] = total.x;
                if (row + 1 < end) y[y_off + r * y_stride + row + 1] = total.y;
            }
        }
    }
}
