#version 450
#extension GL_GOOGLE_include_directive : require
// Write each row's sum and sum of squares.
#include "lib/types.glsl"
#include "lib/reduce.glsl"

layout(push_constant) uniform Push {
    uint x_off, y_off;
    uint n, n_rows;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) writeonly buffer Y { float y[]; };

void main() {
    const uint row = group_index();
    if (row >= n_rows) return;
    float sum = 0.0, squares = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < n; i += LOCAL) {
        const float value = x[x_off + row * n + i];
        sum += value;
        squares += value * value;
    }
    sum = reduce_sum(sum);
    squares = reduce_sum(squares);
    if (gl_LocalInvocationID.x == 0) {
        y[y_off + 2 * row] = sum;
        y[y_off + 2 * row + 1] = squares;
    }
}
