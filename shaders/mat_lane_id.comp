#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
// Compute mat_vec_id and mat_mul_id on software devices (see mat_lane). Each thread multiplies a row of W_e
// by the rows of x in N pairs (row, expert). Unless GROUPED is set, a workgroup has one pair, and `tiles`
// contains expert ids.
#include "lib/types.glsl"
#include "lib/addresses.glsl"

layout(constant_id = 1) const uint N = 1; // pairs per thread, 1..8
layout(constant_id = 2) const uint SUBGROUP = 8; // threads that shuffle x, a power of two up to 16
layout(constant_id = 3) const uint AXIS = 0; // see lib/expert.glsl
layout(constant_id = 4) const uint GROUPED = 0;

layout(push_constant) uniform Push {
    Words w;
    Floats x;
    Words order;
    Words tiles;
    Words starts;
    FloatsOut y;
    uint side, first, count, n_used, n_rows, x_stride, y_stride, x_per_used;
};
#define HOLD
#include "lib/dequant.glsl"
#include "lib/expert.glsl"
#include "lib/lane_dot.glsl"

void main() {
    const uint tile = gl_WorkGroupID.z;
    uint e_id, begin = tile, n_pairs = 1;
    if (GROUPED == 0) {
        e_id = tiles.at[tile];
    } else {
        e_id = tiles.at[3 * tile];
        begin = tiles.at[3 * tile + 1];
        n_pairs = tiles.at[3 * tile + 2];
    }
    if (e_id - first >= count || n_pairs == 0) return; // other piece, or empty
    const Expert e = expert_of(starts.at[e_id], starts.at[e_id + 1], starts.at[first]);
    if (group_index() * LOCAL >= e.n) return;

    uint pair[N];
    [[unroll]] for (uint r = 0; r < N; ++r) {
        const uint p = begin + min(r, n_pairs - 1);
        pair[r] = GROUPED == 0 ? p : order.at[p];
        x_row[r] = (x_per_used != 0 ? pair[r] : pair[r] / n_used) * x_stride;
    }
    const uint row = global_index();
    lane_dot(expert_row(e, min(row, e.n - 1)), e.k);
    if (row < e.n) {
        [[unroll]] for (uint r = 0; r < N; ++r) {
            if (r < n_pairs) y.at[pair[r] * y_stride + row] = sum[r];
        }
    }
}
