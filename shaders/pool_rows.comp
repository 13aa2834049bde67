#version 450
#extension GL_GOOGLE_include_directive : require
// Write the mean of each `count` consecutive rows of x: y[r, i] = mean of x[r * count + j, i] for j < count.
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint x_off, y_off;
    uint n, n_rows, count;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) writeonly buffer Y { float y[]; };

void main() {
    const uint i = global_index();
    if (i >= n * n_rows) return;
    const uint first = x_off + i / n * count * n + i % n;
    float sum = 0.0;
    for (uint j = 0; j < count; ++j) sum += x[first + j * n];
    y[y_off + i] = sum / float(count);
}
