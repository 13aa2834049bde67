#version 450
#extension GL_GOOGLE_include_directive : require
// Add adapters' low-rank updates: y[p, i] = x[p, i] + sum over u of scales[p / n_used, s_first + u] * (sum
// over j of W_e[i, j] * t[p, u, j]) for adapter e = ids[p, u]. Each thread computes element i of N rows p. An
// id outside first..first + count adds nothing.
#include "lib/types.glsl"

layout(constant_id = 1) const uint N = 1; // Rows per thread.
// If STACKED is 0, W_e is `rank` columns of w [n, w_stride], from e * rank on. If it is 1, W_e is rows
// starts[e]..starts[e + 1] of w [., rank].
layout(constant_id = 2) const uint STACKED = 0;

layout(push_constant) uniform Push {
    uint w_off, t_off, ids_off, scales_off, starts_off, x_off, y_off;
    uint n, y_stride, w_stride, rank, t_stride, n_rows, n_used, n_terms, s_stride, s_first, first, count;
};
layout(set = 0, binding = 0) readonly buffer W { uint w[]; };
layout(set = 0, binding = 1) readonly buffer T { float t[]; };
layout(set = 0, binding = 2) readonly buffer Ids { uint ids[]; };
layout(set = 0, binding = 3) readonly buffer Scales { float scales[]; };
layout(set = 0, binding = 4) readonly buffer Starts { uint starts[]; };
layout(set = 0, binding = 5) readonly buffer X { float x[]; };
layout(set = 0, binding = 6) writeonly buffer Y { float y[]; };
#include "lib/dequant.glsl"

void main() {
    const uint i = global_index();
    const uint first_row = gl_WorkGroupID.z * N;
    if (i >= n) return;

    float sum[N];
    bool own[N]; // whether row p of y has element i
    [[unroll]] for (uint r = 0; r < N; ++r) {
        sum[r] = 0.0;
        own[r] = STACKED == 0 && first_row + r < n_rows;
    }
    for (uint u = 0; u < n_terms; ++u) {
        bool used[N];
        uint start[N], t_at[N];
        float part[N];
        [[unroll]] for (uint r = 0; r < N; ++r) {
            const uint p = min(first_row + r, n_rows - 1);
            const uint e = ids[ids_off + p * n_terms + u];
            used[r] = e - first < count && first_row + r < n_rows;
            start[r] = 0;
            if (used[r] && STACKED != 0) {
                const uint begin = starts[starts_off + e];
                own[r] = used[r] = i < starts[starts_off + e + 1] - begin;
                start[r] = row_start(begin - starts[starts_off + first] + i, rank);
            } else if (used[r]) {
                start[r] = row_start(i, w_stride) + e * rank * BLOCK_NBYTES;
            }
            t_at[r] = t_off + (p * n_terms + u) * t_stride;
            part[r] = 0.0;
        }
        const uint rank4 = rank & ~3u;
        for (uint j = 0; j < rank4; j += 4) {
            [[unroll]] for (uint r = 0; r < N; ++r) {
                if (used[r]) {
                    const uint at = t_at[r] + j;
                    part[r] += dot(dequant4(start[r], j), vec4(t[at], t[at + 1], t[at + 2], t[at + 3]));
                }
            }
        }
        for (uint j = rank4; j < rank; ++j) {
            [[unroll]] for (uint r = 0; r < N; ++r) {
                if (used[r]) part[r] += dequant1(start[r], j) * t[t_at[r] + j];
            }
        }
        [[unroll]] for (uint r = 0; r < N; ++r) {
            if (used[r]) sum[r] += scales[scales_off + (first_row + r) / n_used * s_stride + s_first + u] * part[r];
        }
    }
    [[unroll]] for (uint r = 0; r < N; ++r) {
        const uint at = (first_row + r) * y_stride + i;
        if (own[r]) y[y_off + at] = x[x_off + at] + sum[r];
    }
}
