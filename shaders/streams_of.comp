#version 450
#extension GL_GOOGLE_include_directive : require
// Write rows with n_streams streams of n values. The first stream is x, and the others are streams of a,
// scaled to the root mean square of x.
#include "lib/types.glsl"
#include "lib/reduce.glsl"

layout(push_constant) uniform Push {
    uint x_off, a_off, y_off;
    uint n, n_streams, n_rows;
    float least; // minimum for the mean square of a
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer A { float a[]; };
layout(set = 0, binding = 2) writeonly buffer Y { float y[]; };

void main() {
    const uint index = group_index();
    if (index >= n_streams * n_rows) return;
    const uint row = index / n_streams;
    const uint stream = index % n_streams;
    const uint from = a_off + (row * (n_streams - 1) + max(stream, 1) - 1) * n;
    float of_x = 0.0, of_a = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < n; i += LOCAL) {
        of_x += x[x_off + row * n + i] * x[x_off + row * n + i];
        of_a += a[from + i] * a[from + i];
    }
    const float wanted = reduce_sum(of_x);
    const float found = reduce_sum(of_a);
    const float scale = sqrt(wanted / max(found, least * float(n)));
    for (uint i = gl_LocalInvocationID.x; i < n; i += LOCAL) {
        y[y_off + index * n + i] = stream == 0 ? x[x_off + row * n + i] : scale * a[from + i];
    }
}
