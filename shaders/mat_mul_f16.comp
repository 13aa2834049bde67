#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
// As mat_tile in half precision: x are halves of pack_f16, w becomes halves in shared memory, which then takes half the
// bytes, and products go two to an instruction. Sums are halves over 16 elements of k, then floats: |x| / s is below 2, so
// that weights up to 2,047 overflow none of them.
#include "lib/types.glsl"
#include "lib/product_tile.glsl"

layout(constant_id = 1) const uint RM = 4; // rows of w per thread, 4 or 8
layout(constant_id = 2) const uint RN = 4; // rows of x per thread, 1..8
layout(constant_id = 3) const uint FOURS = 0; // whether k is a multiple of 4
#define WHOLE_FOURS (FOURS != 0)

layout(push_constant) uniform Push {
    uint w_off, x_off, b_off, y_off;
    uint k, n, n_rows, y_stride, has_bias;
};
layout(set = 0, binding = 0) readonly buffer W { uint w[]; };
layout(set = 0, binding = 1) readonly buffer X { uint x[]; };
layout(set = 0, binding = 2) readonly buffer B { float b[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };
#include "lib/dequant.glsl"
#include "lib/half_rows.glsl"
#include "lib/tile.glsl"

const uint SUM_K = 16; // elements of k whose products add up in halves

shared f16vec4 w_tile[TK * W_STRIDE]; // [k][row of w / 4]
shared float16_t x_tile[TK * X_STRIDE]; // [k][row of x]

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint first_i = product_tile_of_w(n_rows, TN) * TM;
    if (first_i >= n) return;
    const uint first_r = product_tile_of_x(n_rows, TN) * TN;
    const uint tm = thread % M_THREADS;
    const uint tn = thread / M_THREADS;

    vec4 sum[QM * RN]; // [a * RN + c]: rows 4 (tm + 16 a) .. + 3 of w's tile, row tn RN + c of x's
    [[unroll]] for (uint i = 0; i < QM * RN; ++i) sum[i] = vec4(0.0);

    for (uint slice = 0; slice < k; slice += TK) {
        // TK / 4 neighbouring threads read four rows together
        for (uint e = thread; e < TM / 4 * (TK / 4); e += LOCAL) {
            const uint kk = 4 * (e % (TK / 4));
            const mat4 columns = w_quad(first_i + e / (TK / 4) * 4, slice + kk, n, k);
            [[unroll]] for (uint j = 0; j < 4; ++j) {
                w_tile[(kk + j) * W_STRIDE + e / (TK / 4)] = f16vec4(clamp(columns[j], -65504.0, 65504.0));
            }
        }
        for (uint e = thread; e < TN * (TK / 2); e += LOCAL) {
            const uint r = min(first_r + e / (TK / 2), n_rows - 1);
            const uint kk = 2 * (e % (TK / 2));
            const f16vec2 pair = unpackFloat2x16(x[x_off + r * half_row_words(k) + (slice + kk) / 2]);
            x_tile[kk * X_STRIDE + e / (TK / 2)] = pair.x;
            x_tile[(kk + 1) * X_STRIDE + e / (TK / 2)] = pair.y;
        }
        barrier();
        for (uint first = 0; first < TK; first += SUM_K) {
            f16vec4 part[QM * RN];
            [[unroll]] for (uint i = 0; i < QM * RN; ++i) part[i] = f16vec4(0.0);
            for (uint kk = first; kk < first + SUM_K; ++kk) {
                f16vec4 wv[QM];
                [[unroll]] for (uint a = 0; a < QM; ++a) wv[a] = w_tile[kk * W_STRIDE + tm + a * M_THREADS];
                [[unroll]] for (uint c = 0; c < RN; ++c) {
                    const f16vec4 xv = f16vec4(x_tile[kk * X_STRIDE + tn * RN + c]);
                    [[unroll]] for (uint a = 0; a < QM; ++a) part[a * RN + c] = fma(wv[a], xv, part[a * RN + c]);
                }
            }
            [[unroll]] for (uint i = 0; i < QM * RN; ++i) sum[i] += vec4(part[i]);
        }
        barrier();
    }

    [[unroll]] for (uint c = 0; c < RN; ++c) {
        const uint r = first_r + tn * RN + c;
        if (r >= n_rows) continue;
        const float scale = uintBitsToFloat(x[x_off + r * half_row_words(k) + half_words(k)]);
        [[unroll]] for (uint a = 0; a < QM; ++a) {
            const uint i = first_i + 4 * (tm + a * M_THREADS);
            [[unroll]] for (uint j = 0; j < 4; ++j) {
                if (i + j >= n) break;
                y[y_off + r * y_stride + i + j] = scale * sum[a * RN + c][j] + (has_bias != 0 ? b[b_off + i + j] : 0.0);
            }
        }
    }
}
