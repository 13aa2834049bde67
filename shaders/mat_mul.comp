#version 450
#extension GL_GOOGLE_include_directive : require
// Compute mat_vec for many rows of x (lib/mul_tile.glsl).
#include "lib/types.glsl"
#include "lib/product_tile.glsl"

layout(constant_id = 1) const uint RN = 4; // rows of x per thread, 1..4
layout(constant_id = 2) const uint FOURS = 0; // 1: k is a multiple of 4
#define WHOLE_FOURS (FOURS != 0)

layout(push_constant) uniform Push {
    uint w_off, x_off, b_off, y_off;
    uint k, n, n_rows, y_stride, has_bias;
};
layout(set = 0, binding = 0) readonly buffer W { uint w[]; };
layout(set = 0, binding = 1) readonly buffer X { float x[]; };
layout(set = 0, binding = 2) readonly buffer B { float b[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };
#include "lib/dequant.glsl"
#include "lib/mul_tile.glsl"

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint first_i = product_tile_of_w(n_rows, TN) * TM;
    if (first_i >= n) return;
    const uint first_r = product_tile_of_x(n_rows, TN) * TN;
    vec4 sum[RN];
    [[unroll]] for (uint c = 0; c < RN; ++c) sum[c] = vec4(0.0);

    for (uint slice = 0; slice < k; slice += TK) {
        for (uint e = thread; e < TM * (TK / 4); e += LOCAL) {
            const uint i = e / (TK / 4);
            const uint kk = 4 * (e % (TK / 4));
            hold_w(i, kk, dequant4_tail(row_start(min(first_i + i, n - 1), k), slice + kk, k));
        }
        for (uint e = thread; e < TN * TK; e += LOCAL) {
            const uint r = first_r + e / TK;
            const uint kk = e % TK;
            const bool inside = r < n_rows && slice + kk < k;
            hold_x(e / TK, kk, inside ? x[x_off + r * k + slice + kk] : 0.0);
        }
        barrier();
        add_slice(sum);
        barrier();
    }

    [[unroll]] for (uint c = 0; c < RN; ++c) {
        const uint r = first_r + thread / M_THREADS + c * N_THREADS;
        if (r >= n_rows) continue;
        [[unroll]] for (uint a = 0; a < 4; ++a) {
            const uint i = first_i + thread % M_THREADS + a * M_THREADS;
            if (i < n) y[y_off + r * y_stride + i] = sum[c][a] + (has_bias != 0 ? b[b_off + i] : 0.0);
        }
    }
}
