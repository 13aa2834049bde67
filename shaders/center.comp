#version 450
#extension GL_GOOGLE_include_directive : require
// Subtract the mean of each row. A router reads y, so all devices must compute the same bits. Therefore 32
// lanes sum in a fixed order, a tree adds their sums, and a product with 1 / n replaces the division.
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint x_off, y_off;
    uint n, n_rows;
    float share; // 1 / n
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) writeonly buffer Y { float y[]; };

shared float tree[LOCAL];

void main() {
    const uint lane = gl_LocalInvocationID.x;
    const uint row = group_index();
    if (row >= n_rows) return;
    precise float sum = 0.0;
    for (uint i = lane; i < n; i += LOCAL) sum = sum + x[x_off + row * n + i];
    tree[lane] = sum;
    barrier();
    for (uint s = LOCAL / 2; s > 0; s >>= 1) {
        precise const float joined = tree[lane] + tree[(lane + s) % LOCAL];
        barrier();
        if (lane < s) tree[lane] = joined;
        barrier();
    }
    precise const float mean = tree[0] * share;
    for (uint i = lane; i < n; i += LOCAL) {
        precise const float value = x[x_off + row * n + i] - mean;
        y[y_off + row * n + i] = value;
    }
}
