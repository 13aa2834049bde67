#version 450
#extension GL_GOOGLE_include_directive : require
// Add the chosen experts' outputs in order: y[r, i] = sum over u of weights[r, u] * x[r, u, i].
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint x_off, weights_off, y_off;
    uint n, n_used, n_rows;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer Weights { float weights[]; };
layout(set = 0, binding = 2) writeonly buffer Y { float y[]; };

void main() {
    const uint row = gl_WorkGroupID.z;
    const uint i = global_index();
    if (i >= n) return;
    float sum = 0.0;
    for (uint u = row * n_used; u < (row + 1) * n_used; ++u) {
        sum += weights[weights_off + u] * x[x_off + u * n + i];
    }
    y[y_off + row * n + i] = sum;
}
