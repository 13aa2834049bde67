#version 450
#extension GL_GOOGLE_include_directive : require
// Multiply N rows of x by w, with an optional bias: y[r, i] = sum over k of w[i, k] * x[r, k] + b[i]. TPR
// threads share a row of w. Each thread reads 8 elements at a time, and neighbouring threads read
// neighbouring words.
#include "lib/types.glsl"

layout(constant_id = 1) const uint TPR = 32; // a power of two, at most LOCAL
layout(constant_id = 2) const uint N = 1; // 1..8
layout(constant_id = 3) const uint FOURS = 0; // 1: k is a multiple of 4
#define WHOLE_FOURS (FOURS != 0)

layout(push_constant) uniform Push {
    uint w_off, x_off, b_off, y_off;
    uint k, n, n_rows, y_stride, has_bias, act, up_at;
};
layout(set = 0, binding = 0) readonly buffer W { uint w[]; };
layout(set = 0, binding = 1) readonly buffer X { float x[]; };
layout(set = 0, binding = 2) readonly buffer B { float b[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };
#include "lib/dequant.glsl"
#include "lib/glu.glsl"

shared float tree[N * LOCAL];

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint lane = thread % TPR;
    const uint slot = group_index() * (LOCAL / TPR) + thread / TPR;
    const uint row = act == 0 ? slot : slot / 2; // If act is set, gate and up alternate.
    uint start = row_start(min(row, n - 1), k);
    if (act != 0 && slot % 2 == 1) start += 4 * up_at;

    float sum[N];
    [[unroll]] for (uint r = 0; r < N; ++r) sum[r] = 0.0;
    const uint k8 = k & ~7u;
    for (uint i = 8 * lane; i < k8; i += 8 * TPR) {
        const mat2x4 wv = dequant8(start, i);
        [[unroll]] for (uint r = 0; r < N; ++r) {
            const uint at = x_off + r * k + i;
            sum[r] += dot(wv[0], vec4(x[at], x[at + 1], x[at + 2], x[at + 3]));
            sum[r] += dot(wv[1], vec4(x[at + 4], x[at + 5], x[at + 6], x[at + 7]));
        }
    }
#ifdef HAS_TAIL
    for (uint i = k8 + lane; i < k; i += TPR) {
        const float wv = dequant1(start, i);
        [[unroll]] for (uint r = 0; r < N; ++r) sum[r] += wv * x[x_off + r * k + i];
    }
#endif

    if (TPR > 1) {
        [[unroll]] for (uint r = 0; r < N; ++r) tree[r * LOCAL + thread] = sum[r];
        barrier();
        for (uint s = TPR / 2; s > 0; s >>= 1) {
            if (lane < s) {
                [[unroll]] for (uint r = 0; r < N; ++r) tree[r * LOCAL + thread] += tree[r * LOCAL + thread + s];
            }
            barrier();
        }
    }
    if (lane != 0 || row >= n) return;
    if (act != 0) {
        if (slot % 2 == 1) return;
        [[unroll]] for (uint r = 0; r < N; ++r) {
            const uint at = r * LOCAL + thread;
            y[y_off + r * y_stride + row] = glu_value(act - 1, tree[at], tree[at + TPR]);
        }
    } else {
        const float bias = has_bias != 0 ? b[b_off + row] : 0.0;
        [[unroll]] for (uint r = 0; r < N; ++r) {
            y[y_off + r * y_stride + row] = (TPR > 1 ? tree[r * LOCAL + thread] : sum[r]) + bias;
        }
    }
}
