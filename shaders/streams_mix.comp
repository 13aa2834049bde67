#version 450
#extension GL_GOOGLE_include_directive : require
// A row of x has STREAMS streams x_i of n values. Compute y = sum over i of g_i x_i with
// g_i = sigmoid(scale[0] mixes[r, i] + base[i]) + eps.
#include "lib/types.glsl"

layout(constant_id = 1) const uint STREAMS = 4;

layout(push_constant) uniform Push {
    uint x_off, mixes_off, scale_off, base_off, y_off;
    uint n, n_rows, width;
    float eps;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer Mixes { float mixes[]; };
layout(set = 0, binding = 2) readonly buffer Scale { float scale[]; };
layout(set = 0, binding = 3) readonly buffer Base { float base[]; };
layout(set = 0, binding = 4) writeonly buffer Y { float y[]; };

void main() {
    const uint index = global_index();
    if (index >= n * n_rows) return;
    const uint row = index / n;
    const uint first = row * STREAMS * n + index % n;
    float sum = 0.0;
    [[unroll]] for (uint i = 0; i < STREAMS; ++i) {
        const float z = scale[scale_off] * mixes[mixes_off + row * width + i] + base[base_off + i];
        sum += (1.0 / (1.0 + exp(min(-z, 87.0))) + eps) * x[x_off + first + i * n];
    }
    y[y_off + index] = sum;
}
