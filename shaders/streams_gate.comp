#version 450
#extension GL_GOOGLE_include_directive : require
// Compute y_i = sigmoid(sign(d) sqrt(max(|d|, 1e-6))) a with d = x_i . k_i / sqrt(n), for each of a row's streams
// x_i and k_i of n values. The workgroup ID is (stream, -, row).
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint x_off, k_off, a_off, y_off;
    uint n, n_rows, n_streams;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer K { float k[]; };
layout(set = 0, binding = 2) readonly buffer A { float a[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };

shared float sums[LOCAL];

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint row = gl_WorkGroupID.z;
    const uint first = (row * n_streams + gl_WorkGroupID.x) * n;
    float sum = 0.0;
    for (uint i = thread; i < n; i += LOCAL) sum += x[x_off + first + i] * k[k_off + first + i];
    sums[thread] = sum;
    barrier();
    float total = 0.0;
    for (uint i = 0; i < LOCAL; ++i) total += sums[i];
    const float score = total * inversesqrt(float(n));
    const float root = sign(score) * sqrt(max(abs(score), 1e-6));
    const float gate = 1.0 / (1.0 + exp(min(-root, 87.0)));
    for (uint i = thread; i < n; i += LOCAL) y[y_off + first + i] = gate * a[a_off + row * n + i];
}
