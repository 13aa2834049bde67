#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require
// Compute mat_vec without shared memory or barriers. A subgroup multiplies two rows of w at a time, 8
// elements per thread, and adds the threads' sums.
#include "lib/types.glsl"

layout(constant_id = 1) const uint ROWS = 8; // rows of w per workgroup, an even number
layout(constant_id = 2) const uint N = 1; // 1..8
layout(constant_id = 3) const uint WIDE = 0; // 1: k % 64 is 0; w, x and their rows are aligned to 16 bytes
#define WIDE_W (WIDE != 0)
#define WHOLE_FOURS (WIDE != 0)

layout(push_constant) uniform Push {
    uint w_off, x_off, b_off, y_off;
    uint k, n, n_rows, y_stride, has_bias, act, up_at;
};
layout(set = 0, binding = 0) readonly buffer W { uint w[]; };
layout(set = 0, binding = 0) readonly buffer W4 { uvec4 w4[]; };
layout(set = 0, binding = 1) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer X4 { vec4 x4[]; };
layout(set = 0, binding = 2) readonly buffer B { float b[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };
#include "lib/dequant.glsl"
#include "lib/glu.glsl"

vec4 x_at(uint row, uint i) { // elements 4 i..4 i + 3
    if (WIDE != 0) return x4[row / 4 + i];
    const uint at = row + 4 * i;
    return vec4(x[at], x[at + 1], x[at + 2], x[at + 3]);
}

void main() {
    const uint lane = gl_SubgroupInvocationID;
    const uint first = group_index() * ROWS;
    const uint end = min(first + ROWS, act == 0 ? n : 2 * n); // If act is set, gate and up alternate.
    const uint k8 = k & ~7u;
    for (uint row = first + 2 * gl_SubgroupID; row < end; row += 2 * gl_NumSubgroups) {
        const uint start0 = row_start(act == 0 ? row : row / 2, k);
        const uint start1 = act == 0 ? row_start(min(row + 1, n - 1), k) : start0 + 4 * up_at;
        vec2 sum[N];
        [[unroll]] for (uint r = 0; r < N; ++r) sum[r] = vec2(0.0);
        for (uint base = 0; base < k8; base += 8 * gl_SubgroupSize) {
            const bool inside = base + 8 * lane < k8;
            const uint i = inside ? base + 8 * lane : 0;
            const mat2x4 w0 = dequant8(start0, i);
            const mat2x4 w1 = dequant8(start1, i);
            [[unroll]] for (uint r = 0; r < N; ++r) {
                const uint x_row = x_off + r * k;
                const vec4 x0 = inside ? x_at(x_row, i / 4) : vec4(0.0);
                const vec4 x1 = inside ? x_at(x_row, i / 4 + 1) : vec4(0.0);
                sum[r] += vec2(dot(w0[0], x0) + dot(w0[1], x1), dot(w1[0], x0) + dot(w1[1], x1));
            }
        }
#ifdef HAS_TAIL
        for (uint base = k8; base < k; base += gl_SubgroupSize) {
            const bool inside = base + lane < k;
            const uint i = inside ? base + lane : k8;
            const vec2 wv = vec2(dequant1(start0, i), dequant1(start1, i));
            [[unroll]] for (uint r = 0; r < N; ++r) sum[r] += wv * (inside ? x[x_off + r * k + i] : 0.0);
        }
#endif
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
