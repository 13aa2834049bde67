#version 450
#extension GL_GOOGLE_include_directive : require
// Compute mat_dot for many rows of x (lib/dot_tile.glsl).
#include "lib/types.glsl"
#include "lib/product_tile.glsl"

layout(constant_id = 1) const uint RN = 4; // rows of x per thread, 1..8
layout(constant_id = 2) const uint FUSED = 0; // 1: one fma scales a dot product

layout(push_constant) uniform Push {
    uint w_off, x_off, b_off, y_off;
    uint k, n, n_rows, y_stride, has_bias;
};
layout(set = 0, binding = 0) readonly buffer W { uint w[]; };
layout(set = 0, binding = 1) readonly buffer X { uint x[]; };
layout(set = 0, binding = 2) readonly buffer B { float b[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };
#include "lib/dequant.glsl"
#include "lib/q8.glsl"
#include "lib/quants.glsl"
#include "lib/dot_tile.glsl"

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint first_i = product_tile_of_w(n_rows, TN) * TM;
    if (first_i >= n) return;
    const uint first_r = product_tile_of_x(n_rows, TN) * TN;
    [[unroll]] for (uint c = 0; c < RN; ++c) sum[c] = vec4(0.0);

    const uint w_at = row_start(min(first_i + w_row(), n - 1), k);
    uint x_at[X_ROUNDS];
    [[unroll]] for (uint j = 0; j < X_ROUNDS; ++j) {
        x_at[j] = x_off + min(first_r + x_row_of(j), n_rows - 1) * q8_row_words(k);
    }
    for (uint slice = 0; slice < k; slice += TK) {
        hold_slice(w_at, x_at, k, slice, k);
        barrier();
        add_slice();
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
