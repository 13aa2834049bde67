#version 450
#extension GL_GOOGLE_include_directive : require
// A row of x has STREAMS streams x_i of n values, and r is its row of `routed`. Compute y_i = x_i + sum over
// j of c_ij x_j, where c_ij = sum over k of w[i, j, k] tanh(scale r_k).
#include "lib/types.glsl"
#include "lib/tanh.glsl"

layout(constant_id = 1) const uint STREAMS = 4;

layout(push_constant) uniform Push {
    uint x_off, routed_off, w_off, y_off;
    uint n, n_rows;
    float scale;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer Routed { float routed[]; };
layout(set = 0, binding = 2) readonly buffer W { float w[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };

void main() {
    const uint index = global_index();
    if (index >= n * n_rows) return;
    const uint row = index / n;
    const uint first = row * STREAMS * n + index % n;
    float mode[STREAMS], value[STREAMS];
    [[unroll]] for (uint k = 0; k < STREAMS; ++k) {
        mode[k] = tanh_safe(scale * routed[routed_off + row * STREAMS + k]);
        value[k] = x[x_off + first + k * n];
    }
    [[unroll]] for (uint i = 0; i < STREAMS; ++i) {
        float sum = value[i];
        [[unroll]] for (uint j = 0; j < STREAMS; ++j) {
            float c = 0.0;
            [[unroll]] for (uint k = 0; k < STREAMS; ++k) c += w[w_off + (i * STREAMS + j) * STREAMS + k] * mode[k];
            sum += c * value[j];
        }
        y[y_off + first + i * n] = sum;
    }
}
