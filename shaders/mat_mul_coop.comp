#version 450
#extension GL_GOOGLE_include_directive : require
// As mat_mul, on matrix units: x are halves of pack_f16, w becomes halves in shared memory (magnitudes above 65,504 are
// cut to it), sums are floats. A workgroup of SM x SN subgroups makes a tile of M FM SM rows of w by N FN SN rows of x,
// each subgroup FM x FN matrices of it. In a tile of 128 x 128 with subgroups of 64 x 64, 16 matrices of 16 x 16, a slice
// of 32 k is 16 KiB of shared memory, read twice, for 1 Mi operations: 32 of them per byte.
#include "lib/types.glsl"

layout(constant_id = 1) const uint M = 16; // of the device's matrices: [M, K] by [K, N], K divides 32
layout(constant_id = 2) const uint N = 16;
layout(constant_id = 3) const uint K = 16;
layout(constant_id = 4) const uint FM = 2; // matrices of a subgroup along w
layout(constant_id = 5) const uint FN = 2; // and along x
layout(constant_id = 6) const uint SM = 2; // subgroups along w
layout(constant_id = 7) const uint SN = 2; // and along x; LOCAL is SM SN subgroups
layout(constant_id = 8) const uint LANES = 32; // invocations of a subgroup
#include "lib/coop.glsl"
#include "lib/half_rows.glsl"

layout(push_constant) uniform Push {
    uint w_off, x_off, b_off, y_off;
    uint k, n, n_rows, y_stride, has_bias;
};
layout(set = 0, binding = 0) readonly buffer W { uint w[]; };
layout(set = 0, binding = 1) readonly buffer X { uint x[]; };
layout(set = 0, binding = 2) readonly buffer B { float b[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };
#include "lib/dequant.glsl"
#include "lib/coop_tile.glsl"

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint first_i = group_index() * TM;
    if (first_i >= n) return;
    const uint first_r = gl_WorkGroupID.z * TN;
    const uint own_i = gl_SubgroupID % SM * FM * M; // where this subgroup's part of the tile begins
    const uint own_r = gl_SubgroupID / SM * FN * N;

    MATRIX_SUM sum[FM * FN];
    [[unroll]] for (uint i = 0; i < FM * FN; ++i) sum[i] = MATRIX_SUM(0.0);

    for (uint slice = 0; slice < k; slice += TK) {
        for (uint e = thread; e < TM * (TK / 4); e += LOCAL) { // 8 neighbouring threads read a row's 32 elements
            const uint i = e / (TK / 4);
            const uint kk = 4 * (e % (TK / 4));
            const vec4 value = dequant4_tail(row_start(min(first_i + i, n - 1), k), slice + kk, k);
            w_tile[i * STRIDE + kk / 4] = quad_of(clamp(value, -65504.0, 65504.0));
        }
        for (uint e = thread; e < TN * (TK / 4); e += LOCAL) {
            const uint r = first_r + e / (TK / 4);
            const uint at = x_off + min(r, n_rows - 1) * half_row_words(k) + slice / 2 + 2 * (e % (TK / 4));
            x_tile[e / (TK / 4) * STRIDE + e % (TK / 4)] = quad_of(uvec2(x[at], x[at + 1]));
        }
        barrier();
        for (uint kk = 0; kk < TK; kk += K) {
            MATRIX_A rows[FM];
            [[unroll]] for (uint f = 0; f < FM; ++f) LOAD_ROWS(rows[f], w_tile, (own_i + f * M) * STRIDE + kk / 4, STRIDE);
            [[unroll]] for (uint g = 0; g < FN; ++g) {
                MATRIX_B columns;
                LOAD_COLUMNS(columns, x_tile, (own_r + g * N) * STRIDE + kk / 4, STRIDE);
                [[unroll]] for (uint f = 0; f < FM; ++f) sum[f * FN + g] = MULTIPLY_ADD(rows[f], columns, sum[f * FN + g]);
            }
        }
        barrier();
    }

    // Which value a thread holds is the driver's own matter: they go through shared memory to get scale, bias and bounds.
    const uint begin = gl_SubgroupID * M * N;
    [[unroll]] for (uint f = 0; f < FM; ++f) {
        [[unroll]] for (uint g = 0; g < FN; ++g) {
            STORE_COLUMNS(sum[f * FN + g], results, begin, M);
            barrier();
            for (uint e = gl_SubgroupInvocationID; e < M * N; e += LANES) {
                const uint i = first_i + own_i + f * M + e % M;
                const uint r = first_r + own_r + g * N + e / M;
                if (i < n && r < n_rows) {
                    const float scale = uintBitsToFloat(x[x_off + r * half_row_words(k) + half_words(k)]);
                    y[y_off + r * y_stride + i] = scale * results[begin + e] + (has_bias != 0 ? b[b_off + i] : 0.0);
                }
            }
            barrier();
        }
    }
}
