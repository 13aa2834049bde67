#version 450
#extension GL_GOOGLE_include_directive : require
// Compute mat_mul on matrix units. The input x is F16 from pack_f16. Weights are clamped to +-65,504 and
// converted to F16 in shared memory. SM x SN subgroups compute a tile of M * FM * SM rows of w by N * FN * SN
// rows of x. Each subgroup computes FM x FN matrices.
#include "lib/types.glsl"
#include "lib/product_tile.glsl"

layout(constant_id = 1) const uint M = 16; // the units multiply [M, K] by [K, N]; K divides 32
layout(constant_id = 2) const uint N = 16;
layout(constant_id = 3) const uint K = 16;
layout(constant_id = 4) const uint FM = 2;
layout(constant_id = 5) const uint FN = 2;
layout(constant_id = 6) const uint SM = 2;
layout(constant_id = 7) const uint SN = 2; // LOCAL is SM * SN * LANES
layout(constant_id = 8) const uint LANES = 32;
layout(constant_id = 9) const uint WIDE = 0; // 1: k % 64 is 0; w and its rows are aligned to 16 bytes
#define WIDE_W (WIDE != 0)
#include "lib/coop.glsl"
#include "lib/half_rows.glsl"

layout(push_constant) uniform Push {
    uint w_off, x_off, b_off, y_off;
    uint k, n, n_rows, y_stride, has_bias;
};
layout(set = 0, binding = 0) readonly buffer W { uint w[]; };
layout(set = 0, binding = 0) readonly buffer W4 { uvec4 w4[]; };
layout(set = 0, binding = 1) readonly buffer X { uint x[]; };
layout(set = 0, binding = 1) readonly buffer X4 { uvec4 x4[]; };
layout(set = 0, binding = 2) readonly buffer B { float b[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };
#include "lib/dequant.glsl"
#include "lib/coop_tile.glsl"

uint first_i; // first row of w
uint row_at(uint i) { return row_start(min(first_i + i, n - 1), k); }

void main() {
    first_i = product_tile_of_w(n_rows, TN) * TM;
    if (first_i >= n) return;
    const uint first_r = product_tile_of_x(n_rows, TN) * TN;
    const uint own_i = gl_SubgroupID % SM * FM * M; // this subgroup's part of the tile
    const uint own_r = gl_SubgroupID / SM * FN * N;

    MATRIX_SUM sum[FM * FN];
    [[unroll]] for (uint i = 0; i < FM * FN; ++i) sum[i] = MATRIX_SUM(0.0);

    uint w_at[W_ROUNDS], x_at[X_ROUNDS];
    [[unroll]] for (uint j = 0; j < W_ROUNDS; ++j) w_at[j] = w_place(j);
    [[unroll]] for (uint j = 0; j < X_ROUNDS; ++j) {
        x_at[j] = (x_off + min(first_r + x_row_of(j), n_rows - 1) * half_row_words(k)) / 4 + piece(j) % X_PIECES;
    }
    for (uint slice = 0; slice < k; slice += TK) {
        hold_slice(w_at, x_at, slice, k);
        barrier();
        [[unroll]] for (uint kk = 0; kk < TK; kk += K) {
            MATRIX_A rows[FM];
            [[unroll]] for (uint f = 0; f < FM; ++f) LOAD_ROWS(rows[f], w_tile, (own_i + f * M) * STRIDE + kk / 4, STRIDE);
            MATRIX_B columns[FN];
            [[unroll]] for (uint g = 0; g < FN; ++g) LOAD_COLUMNS(columns[g], x_tile, (own_r + g * N) * STRIDE + kk / 4, STRIDE);
            [[unroll]] for (uint m = 0; m < FM * FN; ++m) sum[m] = MULTIPLY_ADD(rows[m % FM], columns[m / FM], sum[m]);
        }
        barrier();
    }

    // Write the sums through shared memory, because the driver decides which elements of a matrix an
    // invocation holds.
    const uint begin = gl_SubgroupID * M * N;
    [[unroll]] for (uint m = 0; m < FM * FN; ++m) {
        STORE_COLUMNS(sum[m], results, begin, M);
        subgroupBarrier();
        // Unless this loop is unrolled, ANV does not unroll the outer loop and stores the sums in memory.
        [[unroll]] for (uint first = 0; first < M * N; first += LANES) {
            const uint e = first + gl_SubgroupInvocationID;
            const uint i = first_i + own_i + m % FM * M + e % M;
            const uint r = first_r + own_r + m / FM * N + e / M;
            if (i < n && r < n_rows && e < M * N) {
                const float scale = uintBitsToFloat(x[x_off + r * half_row_words(k) + half_words(k)]);
                y[y_off + r * y_stride + i] = scale * results[begin + e] + (has_bias != 0 ? b[b_off + i] : 0.0);
            }
        }
        subgroupBarrier();
    }
}
