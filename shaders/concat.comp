#version 450
#extension GL_GOOGLE_include_directive : require
// Compute y[row] as a[row] followed by b[row / times].
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint a_off, b_off, y_off;
    uint n_a, n_b, n_rows, times;
};
layout(set = 0, binding = 0) readonly buffer A { float a[]; };
layout(set = 0, binding = 1) readonly buffer B { float b[]; };
layout(set = 0, binding = 2) writeonly buffer Y { float y[]; };

void main() {
    const uint i = global_index();
    const uint n = n_a + n_b;
    if (i >= n_rows * n) return;
    const uint row = i / n;
    const uint column = i % n;
    y[y_off + i] = column < n_a ? a[a_off + row * n_a + column] : b[b_off + row / times * n_b + column - n_a];
}
