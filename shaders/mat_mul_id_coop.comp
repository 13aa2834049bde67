#version 450
#extension GL_GOOGLE_include_directive : require
// Compute mat_mul_id on matrix units. Inputs and tiles are as in mat_mul_coop. If AXIS is 1, the op asserts
// that every expert has x_stride columns. Otherwise, values of x after an expert's columns would change the
// row's scale, and a NaN among them would reach the result.
#include "lib/types.glsl"

layout(constant_id = 1) const uint M = 16; // see mat_mul_coop.comp
layout(constant_id = 2) const uint N = 16;
layout(constant_id = 3) const uint K = 16;
layout(constant_id = 4) const uint FM = 2;
layout(constant_id = 5) const uint FN = 2;
layout(constant_id = 6) const uint SM = 2;
layout(constant_id = 7) const uint SN = 2;
layout(constant_id = 8) const uint LANES = 32;
layout(constant_id = 9) const uint AXIS = 0; // see lib/expert.glsl
#include "lib/coop.glsl"
#include "lib/half_rows.glsl"

layout(push_constant) uniform Push {
    uint w_off, x_off, order_off, tiles_off, starts_off, y_off;
    uint side, first, count, n_used, n_rows, x_stride, y_stride, x_per_used;
};
layout(set = 0, binding = 0) readonly buffer W { uint w[]; };
layout(set = 0, binding = 1) readonly buffer X { uint x[]; };
layout(set = 0, binding = 1) readonly buffer X4 { uvec4 x4[]; };
layout(set = 0, binding = 2) readonly buffer Order { uint order[]; };
layout(set = 0, binding = 3) readonly buffer Tiles { uint tiles[]; };
layout(set = 0, binding = 4) readonly buffer Starts { uint starts[]; };
layout(set = 0, binding = 5) writeonly buffer Y { float y[]; };
#include "lib/dequant.glsl"
#include "lib/expert.glsl"
#include "lib/coop_tile.glsl"

shared uint pairs[TN];

uint x_row(uint pair) { return x_off + (x_per_used != 0 ? pair : pair / n_used) * half_row_words(x_stride); }

Expert expert;

uint row_at(uint i) { return expert_row(expert, min(group_index() * TM + i, expert.n - 1)); }

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint tile = tiles_off + 3 * gl_WorkGroupID.z;
    const uint e_id = tiles[tile];
    const uint begin = tiles[tile + 1];
    const uint n_pairs = tiles[tile + 2];
    if (e_id - first >= count || n_pairs == 0) return; // other piece, or empty
    const uint s = starts_off;
    expert = expert_of(starts[s + e_id], starts[s + e_id + 1], starts[s + first]);
    const uint first_i = group_index() * TM;
    if (first_i >= expert.n) return;
    for (uint e = thread; e < TN; e += LOCAL) pairs[e] = order[order_off + begin + min(e, n_pairs - 1)];
    barrier();

    const uint own_i = gl_SubgroupID % SM * FM * M;
    const uint own_p = gl_SubgroupID / SM * FN * N;
    MATRIX_SUM sum[FM * FN];
    [[unroll]] for (uint i = 0; i < FM * FN; ++i) sum[i] = MATRIX_SUM(0.0);

    uint w_at[W_ROUNDS], x_at[X_ROUNDS];
    [[unroll]] for (uint j = 0; j < W_ROUNDS; ++j) w_at[j] = w_place(j);
    [[unroll]] for (uint j = 0; j < X_ROUNDS; ++j) {
        x_at[j] = x_row(pairs[min(x_row_of(j), TN - 1)]) / 4 + piece(j) % X_PIECES;
    }
    for (uint slice = 0; slice < expert.k; slice += TK) {
        hold_slice(w_at, x_at, slice, expert.k);
        barrier();
        [[unroll]] for (uint kk = 0; kk < TK; kk += K) {
            MATRIX_A rows[FM];
            [[unroll]] for (uint f = 0; f < FM; ++f) LOAD_ROWS(rows[f], w_tile, (own_i + f * M) * STRIDE + kk / 4, STRIDE);
            MATRIX_B columns[FN];
            [[unroll]] for (uint g = 0; g < FN; ++g) LOAD_COLUMNS(columns[g], x_tile, (own_p + g * N) * STRIDE + kk / 4, STRIDE);
            [[unroll]] for (uint m = 0; m < FM * FN; ++m) sum[m] = MULTIPLY_ADD(rows[m % FM], columns[m / FM], sum[m]);
        }
        barrier();
    }

    const uint own = gl_SubgroupID * M * N;
    [[unroll]] for (uint m = 0; m < FM * FN; ++m) {
        STORE_COLUMNS(sum[m], results, own, M);
        subgroupBarrier();
        [[unroll]] for (uint first = 0; first < M * N; first += LANES) {
            const uint e = first + gl_SubgroupInvocationID;
            const uint i = first_i + own_i + m % FM * M + e % M;
            const uint p = own_p + m / FM * N + e / M;
            if (i < expert.n && p < n_pairs && e < M * N) {
                const float scale = uintBitsToFloat(x[x_row(pairs[p]) + half_words(x_stride)]);
                y[y_off + pairs[p] * y_stride + i] = scale * results[own + e];
            }
        }
        subgroupBarrier();
    }
}
