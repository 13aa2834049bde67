#version 450
#extension GL_GOOGLE_include_directive : require
// y[r, i] = sum over k of w[i, k] * x[r, k] (+ b[i]) for many rows of x. A workgroup of 16 x 8 threads makes a tile of
// 64 rows of w by 8 RN rows of x, each thread 4 by RN values of it, from slices of 32 k in shared memory (12.3 KiB).
#include "lib/types.glsl"

layout(constant_id = 1) const uint RN = 4; // rows of x per thread, 1..4

layout(push_constant) uniform Push {
    uint w_off, x_off, b_off, y_off;
    uint k, n, n_rows, y_stride, has_bias;
};
layout(set = 0, binding = 0) readonly buffer W { uint w[]; };
layout(set = 0, binding = 1) readonly buffer X { float x[]; };
layout(set = 0, binding = 2) readonly buffer B { float b[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };
#include "lib/dequant.glsl"

const uint TM = 64; // rows of w in a tile
const uint TK = 32; // elements of k in a slice
const uint M_THREADS = 16;
const uint N_THREADS = 8; // LOCAL is M_THREADS * N_THREADS
const uint TN = N_THREADS * RN;
const uint W_STRIDE = TM + 1; // odd, so that the transposing writes spread over the banks
const uint X_STRIDE = TN + 1;

shared float w_tile[TK * W_STRIDE]; // [k][row of w]
shared float x_tile[TK * X_STRIDE]; // [k][row of x]

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint first_i = group_index() * TM;
    if (first_i >= n) return;
    const uint first_r = gl_WorkGroupID.z * TN;
    const uint tm = thread % M_THREADS;
    const uint tn = thread / M_THREADS;

    vec4 sum[RN]; // rows tm, tm + 16, tm + 32, tm + 48 of the tile
    [[unroll]] for (uint c = 0; c < RN; ++c) sum[c] = vec4(0.0);

    for (uint slice = 0; slice < k; slice += TK) {
        for (uint e = thread; e < TM * (TK / 4); e += LOCAL) { // 8 neighbouring threads read a row's 32 elements
            const uint i = e / (TK / 4);
            const uint kk = 4 * (e % (TK / 4));
            const vec4 value = dequant4_tail(row_start(min(first_i + i, n - 1), k), slice + kk, k);
            [[unroll]] for (uint j = 0; j < 4; ++j) w_tile[(kk + j) * W_STRIDE + i] = value[j];
        }
        for (uint e = thread; e < TN * TK; e += LOCAL) {
            const uint r = first_r + e / TK;
            const uint kk = e % TK;
            const bool inside = r < n_rows && slice + kk < k;
            x_tile[kk * X_STRIDE + e / TK] = inside ? x[x_off + r * k + slice + kk] : 0.0;
        }
        barrier();
        for (uint kk = 0; kk < TK; ++kk) {
            const uint at = kk * W_STRIDE + tm;
            const vec4 wv = vec4(w_tile[at], w_tile[at + 16], w_tile[at + 32], w_tile[at + 48]);
            [[unroll]] for (uint c = 0; c < RN; ++c) sum[c] += wv * x_tile[kk * X_STRIDE + tn + c * N_THREADS];
        }
        barrier();
    }

    [[unroll]] for (uint c = 0; c < RN; ++c) {
        const uint r = first_r + tn + c * N_THREADS;
        if (r >= n_rows) continue;
        [[unroll]] for (uint a = 0; a < 4; ++a) {
            const uint i = first_i + tm + a * M_THREADS;
            if (i < n) y[y_off + r * y_stride + i] = sum[c][a] + (has_bias != 0 ? b[b_off + i] : 0.0);
        }
    }
}
