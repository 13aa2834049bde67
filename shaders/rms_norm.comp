#version 450
#extension GL_GOOGLE_include_directive : require
// y = x / sqrt(mean(x^2) + eps) * w, one workgroup per row.
#include "lib/types.glsl"
#include "lib/reduce.glsl"

layout(constant_id = 1) const uint HAS_W = 1; // 0: no weight, w is not read

layout(push_constant) uniform Push {
    uint x_off, w_off, y_off;
    uint n, n_rows;
    float eps;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer W { float w[]; };
layout(set = 0, binding = 2) writeonly buffer Y { float y[]; };

void main() {
    const uint row = group_index();
    if (row >= n_rows) return;
    float sum = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < n; i += LOCAL) {
        const float value = x[x_off + row * n + i];
        sum += value * value;
    }
    const float scale = 1.0 / sqrt(reduce_sum(sum) / float(n) + eps);
    for (uint i = gl_LocalInvocationID.x; i < n; i += LOCAL) {
        float value = x[x_off + row * n + i] * scale;
        if (HAS_W != 0) value *= w[w_off + i];
        y[y_off + row * n + i] = value;
    }
}
