#version 450
#extension GL_GOOGLE_include_directive : require
// Normalise each head of n values: y = x / sqrt(sum(x^2) + eps).
#include "lib/types.glsl"
#include "lib/reduce.glsl"

layout(push_constant) uniform Push {
    uint x_off, y_off;
    uint n, n_heads, x_stride, n_rows;
    float eps;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) writeonly buffer Y { float y[]; };

void main() {
    const uint head = group_index();
    if (head >= n_rows * n_heads) return;
    const uint from = x_off + head / n_heads * x_stride + head % n_heads * n;
    float sum = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < n; i += LOCAL) {
        const float value = x[from + i];
        sum += value * value;
    }
    const float scale = 1.0 / sqrt(reduce_sum(sum) + eps);
    for (uint i = gl_LocalInvocationID.x; i < n; i += LOCAL) y[y_off + head * n + i] = x[from + i] * scale;
}
