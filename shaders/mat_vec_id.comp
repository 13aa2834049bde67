#version 450
#extension GL_GOOGLE_include_directive : require
// Multiply by the chosen experts' matrices: y[r, u] = W_e x for the experts e = ids[r, u]. The matrices in w
// are in the experts' order. The workgroup ID is (rows of W_e, -, pair (r, u)). TPR threads share a row.
#include "lib/types.glsl"

layout(constant_id = 1) const uint TPR = 32; // a power of two, at most LOCAL
layout(constant_id = 2) const uint AXIS = 0; // see lib/expert.glsl

layout(push_constant) uniform Push {
    uint w_off, x_off, ids_off, starts_off, y_off;
    uint side, first, count, n_used, n_rows, x_stride, y_stride, x_per_used;
};
layout(set = 0, binding = 0) readonly buffer W { uint w[]; };
layout(set = 0, binding = 1) readonly buffer X { float x[]; };
layout(set = 0, binding = 2) readonly buffer Ids { uint ids[]; };
layout(set = 0, binding = 3) readonly buffer Starts { uint starts[]; };
layout(set = 0, binding = 4) writeonly buffer Y { float y[]; };
#include "lib/dequant.glsl"
#include "lib/expert.glsl"

shared float tree[LOCAL];

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint lane = thread % TPR;
    const uint pair = gl_WorkGroupID.z; // (row, used expert)
    const uint first_row = group_index() * (LOCAL / TPR);

    const uint expert = ids[ids_off + pair];
    if (expert - first >= count) return; // the expert is in another piece of the stack
    const uint s = starts_off;
    const Expert e = expert_of(starts[s + expert], starts[s + expert + 1], starts[s + first]);
    if (first_row >= e.n) return;

    const uint row = first_row + thread / TPR;
    const uint start = expert_row(e, min(row, e.n - 1));
    const uint x_at = x_off + (x_per_used != 0 ? pair : pair / n_used) * x_stride;

    float sum = 0.0;
    const uint k = e.k;
    const uint k8 = k & ~7u;
    for (uint i = 8 * lane; i < k8; i += 8 * TPR) {
        const uint at = x_at + i;
        const mat2x4 wv = dequant8(start, i);
        sum += dot(wv[0], vec4(x[at], x[at + 1], x[at + 2], x[at + 3]));
        sum += dot(wv[1], vec4(x[at + 4], x[at + 5], x[at + 6], x[at + 7]));
    }
#ifdef HAS_TAIL
    for (uint i = k8 + lane; i < k; i += TPR) sum += dequant1(start, i) * x[x_at + i];
#endif

    if (TPR > 1) {
        tree[thread] = sum;
        barrier();
        for (uint s = TPR / 2; s > 0; s >>= 1) {
            if (lane < s) tree[thread] += tree[thread + s];
            barrier();
        }
        sum = tree[thread];
    }
    if (lane == 0 && row < e.n) y[y_off + pair * y_stride + row] = sum;
}
