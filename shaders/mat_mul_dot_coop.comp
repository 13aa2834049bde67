#version 450
#extension GL_GOOGLE_include_directive : require
// Compute mat_mul_dot on matrix units. The shader is fast only if int8 matrix units are much faster than F16,
// because scaling takes three instructions per value and block.
#include "lib/types.glsl"
#include "lib/product_tile.glsl"

layout(constant_id = 1) const uint M = 16; // see mat_mul_coop.comp
layout(constant_id = 2) const uint N = 16;
layout(constant_id = 3) const uint K = 32;
layout(constant_id = 4) const uint FM = 2;
layout(constant_id = 5) const uint FN = 2;
layout(constant_id = 6) const uint SM = 2;
layout(constant_id = 7) const uint SN = 2;
layout(constant_id = 8) const uint LANES = 32;
layout(constant_id = 9) const uint WIDE = 0; // 1: k % 64 is 0; w, x and their rows are aligned to 16 bytes
#define WIDE_W (WIDE != 0)

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
#include "lib/q8.glsl"
#include "lib/coop_dot.glsl"

shared float results[SM * SN * M * N]; // one matrix [row of x][row of w] per subgroup

void main() {
    const uint first_i = product_tile_of_w(n_rows, TN) * TM;
    if (first_i >= n) return;
    const uint first_r = product_tile_of_x(n_rows, TN) * TN;
    const uint own_i = gl_SubgroupID % SM * FM * M;
    const uint own_r = gl_SubgroupID / SM * FN * N;

    MATRIX_SUM sum[FM * FN];
    [[unroll]] for (uint i = 0; i < FM * FN; ++i) sum[i] = MATRIX_SUM(0.0);

    uint w_at[W_ROUNDS], x_at[X_ROUNDS];
    [[unroll]] for (uint j = 0; j < W_ROUNDS; ++j) w_at[j] = row_start(min(first_i + w_row_of(j), n - 1), k);
    [[unroll]] for (uint j = 0; j < X_ROUNDS; ++j) {
        x_at[j] = x_off + min(first_r + x_row_of(j), n_rows - 1) * q8_row_words(k);
    }
    for (uint slice = 0; slice < k; slice += TK) {
        hold_slice(w_at, x_at, slice, k);
        barrier();
        [[unroll]] for (uint block = 0; block < BLOCKS; ++block) {
            CODES_A rows[FM * 32 / K];
            MATRIX_SUM scale[FM];
            [[unroll]] for (uint f = 0; f < FM; ++f) {
                [[unroll]] for (uint part = 0; part < 32 / K; ++part) {
                    LOAD_W_CODES(rows[f * 32 / K + part], own_i + f * M, 32 * block + part * K);
                }
                LOAD_COLUMN(scale[f], w_scale, block * TM + own_i + f * M);
            }
            [[unroll]] for (uint g = 0; g < FN; ++g) {
                CODES_B columns[32 / K];
                [[unroll]] for (uint part = 0; part < 32 / K; ++part) {
                    LOAD_X_CODES(columns[part], own_r + g * N, 32 * block + part * K);
                }
                MATRIX_SUM of_x;
                LOAD_ROW(of_x, x_scale, block * TN + own_r + g * N);
#ifdef HAS_LOW
                MATRIX_SUM sum_x;
                LOAD_ROW(sum_x, x_sum, block * TN + own_r + g * N);
#endif
                [[unroll]] for (uint f = 0; f < FM; ++f) {
                    MATRIX_DOTS dots = MATRIX_DOTS(0);
                    [[unroll]] for (uint part = 0; part < 32 / K; ++part) {
                        dots = coopMatMulAdd(rows[f * 32 / K + part], columns[part], dots);
                    }
                    const MATRIX_SUM value = MATRIX_SUM(dots);
                    for (uint e = 0; e < value.length(); ++e) sum[g * FM + f][e] += value[e] * scale[f][e] * of_x[e];
#ifdef HAS_LOW
                    MATRIX_SUM low; // loading it earlier would spill registers
                    LOAD_COLUMN(low, w_low, block * TM + own_i + f * M);
                    for (uint e = 0; e < low.length(); ++e) sum[g * FM + f][e] += low[e] * sum_x[e];
#endif
                }
            }
        }
        barrier();
    }

    const uint begin = gl_SubgroupID * M * N;
    [[unroll]] for (uint m = 0; m < FM * FN; ++m) {
        coopMatStore(sum[m], results, begin, M, gl_CooperativeMatrixLayoutColumnMajor);
        subgroupBarrier();
        [[unroll]] for (uint first = 0; first < M * N; first += LANES) {
            const uint e = first + gl_SubgroupInvocationID;
            const uint i = first_i + own_i + m % FM * M + e % M;
            const uint r = first_r + own_r + m / FM * N + e / M;
            if (i < n && r < n_rows && e < M * N) {
                y[y_off + r * y_stride + i] = results[begin + e] + (has_bias != 0 ? b[b_off + i] : 0.0);
            }
        }
        subgroupBarrier();
    }
}
