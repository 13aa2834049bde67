#version 450
#extension GL_GOOGLE_include_directive : require
// Compute y = (x - mean(x)) / sqrt(var(x) + eps) * w + b for each row. The variance is computed from x -
// mean, which avoids cancellation.
#include "lib/types.glsl"
#include "lib/reduce.glsl"

layout(constant_id = 1) const uint HAS_B = 1;

layout(push_constant) uniform Push {
    uint x_off, w_off, b_off, y_off;
    uint n, n_rows;
    float eps;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer W { float w[]; };
layout(set = 0, binding = 2) readonly buffer B { float b[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };

void main() {
    const uint row = group_index();
    if (row >= n_rows) return;
    const uint from = x_off + row * n;
    float sum = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < n; i += LOCAL) sum += x[from + i];
    const float mean = reduce_sum(sum) / float(n);
    float squares = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < n; i += LOCAL) squares += (x[from + i] - mean) * (x[from + i] - mean);
    const float scale = 1.0 / sqrt(reduce_sum(squares) / float(n) + eps);
    for (uint i = gl_LocalInvocationID.x; i < n; i += LOCAL) {
        const float value = (x[from + i] - mean) * scale * w[w_off + i];
        y[y_off + row * n + i] = HAS_B != 0 ? value + b[b_off + i] : value;
    }
}
