#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require
// Compute mat_vec with x in 8 bits. A subgroup multiplies two rows of w at a time. In both rows, a thread
// multiplies one group of elements that share a scale.
#include "lib/types.glsl"

layout(constant_id = 1) const uint ROWS = 8; // rows of w per workgroup, an even number
layout(constant_id = 2) const uint N = 1; // 1..8
layout(constant_id = 3) const uint WIDE = 0; // 1: w, x and their rows are aligned to 16 bytes
#define WIDE_W (WIDE != 0)

layout(push_constant) uniform Push {
    uint w_off, x_off, b_off, y_off;
    uint k, n, n_rows, y_stride, has_bias, act, up_at;
};
layout(set = 0, binding = 0) readonly buffer W { uint w[]; };
layout(set = 0, binding = 0) readonly buffer W4 { uvec4 w4[]; };
layout(set = 0, binding = 1) readonly buffer X { uint x[]; };
layout(set = 0, binding = 1) readonly buffer X4 { uvec4 x4[]; };
layout(set = 0, binding = 2) readonly buffer B { float b[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };
#include "lib/dequant.glsl"
#include "lib/glu.glsl"
#include "lib/q8.glsl"
#include "lib/quants.glsl"

// Return the codes of elements 16 * i..16 * i + 15 in the row of x at word `row`. With this form of the
// index, the compiler computes i once for all rows of x, and row / 4 once per subgroup.
uvec4 codes_at(uint row, uint i) {
    if (WIDE != 0) return x4[row / 4 + i];
    const uint at = row + 4 * i;
    return uvec4(x[at], x[at + 1], x[at + 2], x[at + 3]);
}

void main() {
    const uint lane = gl_SubgroupInvocationID;
    const uint first = group_index() * ROWS;
    const uint end = min(first + ROWS, act == 0 ? n : 2 * n); // If act is set, gate and up alternate.
    for (uint row = first + 2 * gl_SubgroupID; row < end; row += 2 * gl_NumSubgroups) {
        const uint start0 = row_start(act == 0 ? row : row / 2, k);
        const uint start1 = act == 0 ? row_start(min(row + 1, n - 1), k) : start0 + 4 * up_at;
        vec2 sum[N];
        [[unroll]] for (uint r = 0; r < N; ++r) sum[r] = vec2(0.0);
        for (uint base = 0; base < k; base += GROUP * gl_SubgroupSize) {
            // All lanes execute every iteration, because subgroupAdd needs all lanes. Lanes past the row's
            // end add zeros.
            const bool inside = base + GROUP * lane < k;
            const uint i = inside ? base + GROUP * lane : 0;
            const Group g0 = group_at(start0, i);
            const Group g1 = group_at(start1, i);
            [[unroll]] for (uint r = 0; r < N; ++r) {
                const uint x_row = x_off + r * q8_row_words(k);
                const uint block = x_row + q8_block(k, i);
                uvec4 codes[GROUP / 16];
                [[unroll]] for (uint c = 0; c < GROUP / 16; ++c) {
                    codes[c] = codes_at(x_row, i / 16 + c);
                }
                const int x_sum = group_sum(x[block + 1], i);
                const float scale = inside ? uintBitsToFloat(x[block]) : 0.0;
                sum[r] += scale * vec2(product(g0, codes, x_sum), product(g1, codes, x_sum));
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
