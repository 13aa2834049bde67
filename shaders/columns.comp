#version 450
#extension GL_GOOGLE_include_directive : require
// Copy columns: y[r, i] = x[r, first + i].
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint x_off, y_off;
    uint n, width, first, n_rows;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) writeonly buffer Y { float y[]; };

void main() {
    const uint i = global_index();
    if (i < n * n_rows) y[y_off + i] = x[x_off + i / n * width + first + i % n];
}
