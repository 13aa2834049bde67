#version 450
#extension GL_GOOGLE_include_directive : require
// Multiply each head by its own matrix: y[r, h, i] = sum over k of w[h, i, k] * x[r, h, k]. TPR threads share
// a row of w. The workgroup ID is (rows of w, -, tile of N rows of x).
#include "lib/types.glsl"

layout(constant_id = 1) const uint TPR = 32; // a power of two, at most LOCAL
layout(constant_id = 2) const uint N = 1; // rows of x per workgroup

layout(push_constant) uniform Push {
    uint w_off, x_off, y_off;
    uint k, n, n_heads, n_rows;
};
layout(set = 0, binding = 0) readonly buffer W { uint w[]; };
layout(set = 0, binding = 1) readonly buffer X { float x[]; };
layout(set = 0, binding = 2) writeonly buffer Y { float y[]; };
#include "lib/dequant.glsl"

shared float tree[N * LOCAL];

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint lane = thread % TPR;
    const uint row = group_index() * (LOCAL / TPR) + thread / TPR;
    const uint first = gl_WorkGroupID.z * N;
    const uint own = min(row, n_heads * n - 1);
    const uint start = row_start(own, k);
    const uint head = own / n;

    float sum[N];
    [[unroll]] for (uint r = 0; r < N; ++r) sum[r] = 0.0;
    const uint k8 = k & ~7u;
    for (uint i = 8 * lane; i < k8; i += 8 * TPR) {
        const mat2x4 wv = dequant8(start, i);
        [[unroll]] for (uint r = 0; r < N; ++r) {
            const uint at = x_off + (min(first + r, n_rows - 1) * n_heads + head) * k + i;
            sum[r] += dot(wv[0], vec4(x[at], x[at + 1], x[at + 2], x[at + 3]));
            sum[r] += dot(wv[1], vec4(x[at + 4], x[at + 5], x[at + 6], x[at + 7]));
        }
    }
#ifdef HAS_TAIL
    for (uint i = k8 + lane; i < k; i += TPR) {
        const float wv = dequant1(start, i);
        [[unroll]] for (uint r = 0; r < N; ++r) {
            sum[r] += wv * x[x_off + (min(first + r, n_rows - 1) * n_heads + head) * k + i];
        }
    }
#endif

    [[unroll]] for (uint r = 0; r < N; ++r) tree[r * LOCAL + thread] = sum[r];
    barrier();
    for (uint s = TPR / 2; s > 0; s >>= 1) {
        if (lane < s) {
            [[unroll]] for (uint r = 0; r < N; ++r) tree[r * LOCAL + thread] += tree[r * LOCAL + thread + s];
        }
        barrier();
    }
    if (lane != 0 || row >= n_heads * n) return;
    for (uint r = 0; r < N && first + r < n_rows; ++r) {
        y[y_off + (first + r) * n_heads * n + row] = tree[r * LOCAL + thread];
    }
}
