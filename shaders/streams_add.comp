#version 450
#extension GL_GOOGLE_include_directive : require
// A row of x has n_streams streams of n values. Add a to all streams except the first.
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint x_off, a_off, y_off;
    uint n, n_streams, n_rows;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer A { float a[]; };
layout(set = 0, binding = 2) writeonly buffer Y { float y[]; };

void main() {
    const uint i = global_index();
    const uint width = n * n_streams;
    if (i >= width * n_rows) return;
    y[y_off + i] = i % width < n ? x[x_off + i] : x[x_off + i] + a[a_off + i / width * n + i % n];
}
