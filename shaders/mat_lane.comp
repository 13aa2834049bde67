#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
// Compute mat_vec and mat_mul on software devices. On these devices invocations are SIMD lanes, and reading a
// buffer takes as long as dozens of multiply-adds. Each thread multiplies a row of w by N rows of x. A
// subgroup reads SUBGROUP neighbouring elements of x and shuffles them. Arrays are read by address, because
// software devices check the bounds of a binding lane by lane.
#include "lib/types.glsl"
#include "lib/product_tile.glsl"
#include "lib/addresses.glsl"

layout(constant_id = 1) const uint N = 1; // rows of x per thread, 1..8
layout(constant_id = 2) const uint SUBGROUP = 8; // threads that shuffle x, a power of two up to 16

layout(push_constant) uniform Push {
    Words w;
    Floats x;
    Floats b;
    FloatsOut y;
    uint k, n, n_rows, y_stride, has_bias, act, up_at;
};
#define HOLD
#include "lib/dequant.glsl"
#include "lib/glu.glsl"

#include "lib/lane_dot.glsl"

void main() {
    const uint index = product_tile_of_w(n_rows, N) * LOCAL + gl_LocalInvocationID.x;
    const uint row = act == 0 ? index : index / 2; // If act is set, gate and up alternate.
    const bool is_up = act != 0 && index % 2 == 1;
    const uint first_r = product_tile_of_x(n_rows, N) * N;
    [[unroll]] for (uint r = 0; r < N; ++r) x_row[r] = min(first_r + r, n_rows - 1) * k;
    lane_dot(row_start(min(row, n - 1), k) + (is_up ? 4 * up_at : 0), k);
    if (act != 0) {
        [[unroll]] for (uint r = 0; r < N; ++r) sum[r] = glu_value(act - 1, sum[r], subgroupShuffleXor(sum[r], 1));
    }
    if (row < n && !is_up) {
        const float bias = has_bias != 0 ? b.at[row] : 0.0;
        [[unroll]] for (uint r = 0; r < N; ++r) {
            if (first_r + r < n_rows) y.at[(first_r + r) * y_stride + row] = sum[r] + bias;
        }
    }
}
