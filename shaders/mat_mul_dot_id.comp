#version 450
#extension GL_GOOGLE_include_directive : require
// Compute mat_dot_id for many pairs (r, u). Workgroup z computes a tile of one expert's pairs, from
// moe_group. Tiles are as in mat_mul_dot.
#include "lib/types.glsl"

layout(constant_id = 1) const uint RN = 2; // pairs per thread, 1..4
layout(constant_id = 2) const uint FUSED = 0; // 1: one fma scales a dot product
layout(constant_id = 3) const uint AXIS = 0; // see lib/expert.glsl

layout(push_constant) uniform Push {
    uint w_off, x_off, order_off, tiles_off, starts_off, y_off;
    uint side, first, count, n_used, n_rows, x_stride, y_stride, x_per_used;
};
layout(set = 0, binding = 0) readonly buffer W { uint w[]; };
layout(set = 0, binding = 1) readonly buffer X { uint x[]; };
layout(set = 0, binding = 2) readonly buffer Order { uint order[]; };
layout(set = 0, binding = 3) readonly buffer Tiles { uint tiles[]; };
layout(set = 0, binding = 4) readonly buffer Starts { uint starts[]; };
layout(set = 0, binding = 5) writeonly buffer Y { float y[]; };
#include "lib/dequant.glsl"
#include "lib/expert.glsl"
#include "lib/q8.glsl"
#include "lib/quants.glsl"
#include "lib/dot_tile.glsl"

shared uint pairs[TN];

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint at = tiles_off + 3 * gl_WorkGroupID.z;
    const uint e_id = tiles[at];
    const uint begin = tiles[at + 1];
    const uint n_pairs = tiles[at + 2];
    if (e_id - first >= count || n_pairs == 0) return; // other piece, or empty
    const uint s = starts_off;
    const Expert e = expert_of(starts[s + e_id], starts[s + e_id + 1], starts[s + first]);
    const uint first_i = group_index() * TM;
    if (first_i >= e.n) return;
    if (thread < TN) pairs[thread] = order[order_off + begin + min(thread, n_pairs - 1)];
    barrier();

    [[unroll]] for (uint c = 0; c < RN; ++c) sum[c] = vec4(0.0);
    const uint w_at = expert_row(e, min(first_i + w_row(), e.n - 1));
    uint x_at[X_ROUNDS];
    [[unroll]] for (uint j = 0; j < X_ROUNDS; ++j) {
        const uint p = pairs[x_row_of(j)];
        x_at[j] = x_off + (x_per_used != 0 ? p : p / n_used) * q8_row_words(x_stride);
    }
    for (uint slice = 0; slice < e.k; slice += TK) {
        hold_slice(w_at, x_at, x_stride, slice, e.k);
        barrier();
        add_slice();
        barrier();
    }

    [[unroll]] for (uint c = 0; c < RN; ++c) {
        const uint r = thread / M_THREADS + c * N_THREADS;
        if (r >= n_pairs) continue;
        [[unroll]] for (uint a = 0; a < 4; ++a) {
            const uint i = first_i + thread % M_THREADS + a * M_THREADS;
            if (i < e.n) y[y_off + pairs[r] * y_stride + i] = sum[c][a];
        }
    }
}
