#version 450
#extension GL_GOOGLE_include_directive : require
// y[r, i] = x[r, i] / sqrt(squares[r] / width + eps) * w[i]: the rest of an RMS norm over `width` values, of which x has n
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint x_off, squares_off, w_off, y_off;
    uint n, width, n_rows;
    float eps;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer Squares { float squares[]; };
layout(set = 0, binding = 2) readonly buffer W { float w[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };

void main() {
    const uint i = global_index();
    if (i >= n * n_rows) return;
    y[y_off + i] = x[x_off + i] * (1.0 / sqrt(squares[squares_off + i / n] / float(width) + eps)) * w[w_off + i % n];
}
