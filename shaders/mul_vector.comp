#version 450
#extension GL_GOOGLE_include_directive : require
// Multiply rows by a vector: y[r, i] = x[r, i] * v[i].
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint x_off, v_off, y_off;
    uint n, n_rows;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer V { float v[]; };
layout(set = 0, binding = 2) writeonly buffer Y { float y[]; };

void main() {
    const uint i = global_index();
    if (i < n * n_rows) y[y_off + i] = x[x_off + i] * v[v_off + i % n];
}
