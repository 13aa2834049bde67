#version 450
#extension GL_GOOGLE_include_directive : require
// Compute the RMS norm of each row: y = x / sqrt(mean(x^2) + eps) * w.
#include "lib/types.glsl"
#include "lib/reduce.glsl"

layout(constant_id = 1) const uint HAS_W = 1;
layout(constant_id = 2) const uint BATCH = 1; // elements in flight

layout(push_constant) uniform Push {
    uint x_off, w_off, y_off;
    uint n, n_rows;
    float eps;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer W { float w[]; };
layout(set = 0, binding = 2) writeonly buffer Y { uint y[]; }; // floats, or 8 bits (OUT_Q8)
#include "lib/row_elements.glsl"

void main() {
    const uint row = group_index();
    if (row >= n_rows) return;
    const uint lane = gl_LocalInvocationID.x;
    const uint from = x_off + row * n;
    float value[EACH];
    float sum = 0.0;
    for (uint first = FIRST * lane; first < n; first += EACH * LOCAL) {
        [[unroll]] for (uint u = 0; u < EACH; ++u) value[u] = x[from + min(first + u * NEXT, n - 1)];
        [[unroll]] for (uint u = 0; u < EACH; ++u) sum += first + u * NEXT < n ? value[u] * value[u] : 0.0;
    }
    const float scale = 1.0 / sqrt(reduce_sum(sum) / float(n) + eps);
#ifdef OUT_Q8
    for (uint first = 4 * lane; first - 4 * lane < n; first += 4 * Q8_QUADS * LOCAL) {
        vec4 quad[Q8_QUADS];
        [[unroll]] for (uint q = 0; q < Q8_QUADS; ++q) {
            const uint i = min(first + 4 * q * LOCAL, n - 4);
            quad[q] = vec4(x[from + i], x[from + i + 1], x[from + i + 2], x[from + i + 3]) * scale;
            if (HAS_W != 0) quad[q] *= vec4(w[w_off + i], w[w_off + i + 1], w[w_off + i + 2], w[w_off + i + 3]);
        }
        put_q8(quad, y_off + row * q8_row_words(n), n, first, n);
    }
#else
    for (uint first = lane; first < n; first += EACH * LOCAL) {
        [[unroll]] for (uint u = 0; u < EACH; ++u) {
            const uint i = min(first + u * LOCAL, n - 1);
            value[u] = x[from + i] * scale;
            if (HAS_W != 0) value[u] *= w[w_off + i];
        }
        [[unroll]] for (uint u = 0; u < EACH; ++u) {
            const uint i = first + u * LOCAL;
            if (i < n) y[y_off + row * n + i] = floatBitsToUint(value[u]);
        }
    }
#endif
}
