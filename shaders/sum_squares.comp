#version 450
#extension GL_GOOGLE_include_directive : require
// y[r] = sum of x[r, i]^2 over the columns first..first + n, one workgroup per row
#include "lib/types.glsl"
#include "lib/reduce.glsl"

layout(push_constant) uniform Push {
    uint x_off, y_off;
    uint n, width, first, n_rows;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) writeonly buffer Y { float y[]; };

void main() {
    const uint row = group_index();
    if (row >= n_rows) return;
    const uint from = x_off + row * width + first;
    float sum = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < n; i += LOCAL) sum += x[from + i] * x[from + i];
    const float total = reduce_sum(sum);
    if (gl_LocalInvocationID.x == 0) y[y_off + row] = total;
}
