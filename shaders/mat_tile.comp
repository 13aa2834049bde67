#version 450
#extension GL_GOOGLE_include_directive : require
// Compute mat_mul on GPUs. A workgroup of 16 x 8 threads computes a tile of 16 * RM rows of w by 8 * RN rows
// of x. For each k, a thread reads RM + RN floats from shared memory and computes RM * RN multiply-adds.
#include "lib/types.glsl"
#include "lib/product_tile.glsl"

layout(constant_id = 1) const uint RM = 4; // rows of w per thread, 4 or 8
layout(constant_id = 2) const uint RN = 4; // rows of x per thread, 1..8
layout(constant_id = 3) const uint FOURS = 0; // 1: k is a multiple of 4
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
#include "lib/tile.glsl"

shared vec4 w_tile[TK * W_STRIDE]; // [k][row of w / 4]
shared float x_tile[TK * X_STRIDE]; // [k][row of x]

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint first_i = product_tile_of_w(n_rows, TN) * TM;
    if (first_i >= n) return;
    const uint first_r = product_tile_of_x(n_rows, TN) * TN;
    const uint tm = thread % M_THREADS;
    const uint tn = thread / M_THREADS;

    vec4 sum[QM * RN]; // sum[a * RN + c]: four rows of w at 4 * (tm + 16 * a), row tn * RN + c of x
    [[unroll]] for (uint i = 0; i < QM * RN; ++i) sum[i] = vec4(0.0);

    for (uint slice = 0; slice < k; slice += TK) {
        for (uint e = thread; e < TM / 4 * (TK / 4); e += LOCAL) {
            const uint kk = 4 * (e % (TK / 4));
            const mat4 columns = w_quad(first_i + e / (TK / 4) * 4, slice + kk, n, k);
            [[unroll]] for (uint j = 0; j < 4; ++j) w_tile[(kk + j) * W_STRIDE + e / (TK / 4)] = columns[j];
        }
        for (uint e = thread; FOURS != 0 && e < TN * TK / 4; e += LOCAL) {
            const uint kk = 4 * (e % (TK / 4));
            const uint at = x_off + min(first_r + e / (TK / 4), n_rows - 1) * k + min(slice + kk, k - 4);
            const vec4 four = vec4(x[at], x[at + 1], x[at + 2], x[at + 3]);
            const vec4 value = slice + kk < k ? four : vec4(0.0);
            [[unroll]] for (uint j = 0; j < 4; ++j) x_tile[(kk + j) * X_STRIDE + e / (TK / 4)] = value[j];
        }
        for (uint e = thread; FOURS == 0 && e < TN * TK; e += LOCAL) {
            const uint r = first_r + e / TK;
            const uint kk = e % TK;
            const bool inside = r < n_rows && slice + kk < k;
            x_tile[kk * X_STRIDE + e / TK] = inside ? x[x_off + r * k + slice + kk] : 0.0;
        }
        barrier();
        for (uint kk = 0; kk < TK; ++kk) {
            vec4 wv[QM];
            [[unroll]] for (uint a = 0; a < QM; ++a) wv[a] = w_tile[kk * W_STRIDE + tm + a * M_THREADS];
            [[unroll]] for (uint c = 0; c < RN; ++c) {
                const float xv = x_tile[kk * X_STRIDE + tn * RN + c];
                [[unroll]] for (uint a = 0; a < QM; ++a) sum[a * RN + c] += wv[a] * xv;
            }
        }
        barrier();
    }

    [[unroll]] for (uint c = 0; c < RN; ++c) {
        const uint r = first_r + tn * RN + c;
        if (r >= n_rows) continue;
        [[unroll]] for (uint a = 0; a < QM; ++a) {
            const uint i = first_i + 4 * (tm + a * M_THREADS);
            [[unroll]] for (uint j = 0; j < 4; ++j) {
                if (i + j >= n) break;
                y[y_off + r * y_stride + i + j] = sum[a * RN + c][j] + (has_bias != 0 ? b[b_off + i + j] : 0.0);
            }
        }
    }
}
