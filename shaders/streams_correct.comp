#version 450
#extension GL_GOOGLE_include_directive : require
// A row of x has STREAMS streams x_i of n values, and r is its row of `routed`. Compute y_i = x_i + (1 + sum
// over k of w[i, k] tanh(scale r_k)) (a - x_0) and z = y_0 g.
#include "lib/types.glsl"
#include "lib/tanh.glsl"

layout(constant_id = 1) const uint STREAMS = 4;

layout(push_constant) uniform Push {
    uint x_off, a_off, routed_off, w_off, g_off, y_off, z_off;
    uint n, n_rows;
    float scale;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer A { float a[]; };
layout(set = 0, binding = 2) readonly buffer Routed { float routed[]; };
layout(set = 0, binding = 3) readonly buffer W { float w[]; };
layout(set = 0, binding = 4) readonly buffer G { float g[]; };
layout(set = 0, binding = 5) writeonly buffer Y { float y[]; };
layout(set = 0, binding = 6) writeonly buffer Z { float z[]; };

void main() {
    const uint index = global_index();
    if (index >= n * n_rows) return;
    const uint row = index / n;
    const uint first = row * STREAMS * n + index % n;
    float mode[STREAMS];
    [[unroll]] for (uint k = 0; k < STREAMS; ++k) mode[k] = tanh_safe(scale * routed[routed_off + row * STREAMS + k]);
    const float innovation = a[a_off + index] - x[x_off + first];
    [[unroll]] for (uint i = 0; i < STREAMS; ++i) {
        float c = 1.0;
        [[unroll]] for (uint k = 0; k < STREAMS; ++k) c += w[w_off + i * STREAMS + k] * mode[k];
        const float value = x[x_off + first + i * n] + c * innovation;
        y[y_off + first + i * n] = value;
        if (i == 0) z[z_off + index] = value * g[g_off + index % n];
    }
}
