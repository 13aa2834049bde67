#version 450
#extension GL_GOOGLE_include_directive : require
// A row of x has STREAMS streams x_i of n values. Compute y_i = x_i + g_i a with
// g_i = gain sigmoid(scale[1] mixes[r, STREAMS + i] + base[STREAMS + i]) + eps.
#include "lib/types.glsl"

layout(constant_id = 1) const uint STREAMS = 4;

layout(push_constant) uniform Push {
    uint x_off, a_off, mixes_off, scale_off, base_off, y_off;
    uint n, n_rows;
    float gain, eps;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer A { float a[]; };
layout(set = 0, binding = 2) readonly buffer Mixes { float mixes[]; };
layout(set = 0, binding = 3) readonly buffer Scale { float scale[]; };
layout(set = 0, binding = 4) readonly buffer Base { float base[]; };
layout(set = 0, binding = 5) writeonly buffer Y { float y[]; };

void main() {
    const uint index = global_index();
    if (index >= n * n_rows) return;
    const uint row = index / n;
    const uint first = row * STREAMS * n + index % n;
    const float value = a[a_off + index];
    [[unroll]] for (uint i = 0; i < STREAMS; ++i) {
        const uint at = STREAMS + i;
        const float z = scale[scale_off + 1] * mixes[mixes_off + row * 2 * STREAMS + at] + base[base_off + at];
        y[y_off + first + i * n] = x[x_off + first + i * n] + (gain / (1.0 + exp(min(-z, 87.0))) + eps) * value;
    }
}
