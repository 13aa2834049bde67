#version 450
#extension GL_GOOGLE_include_directive : require
// A row has STREAMS streams x_i and the stream a. The score of a stream s is w . s / rms(s). Write the sum of
// the streams, weighted by the softmax of their scores.
#include "lib/types.glsl"
#include "lib/reduce.glsl"

layout(constant_id = 1) const uint STREAMS = 4;

layout(push_constant) uniform Push {
    uint x_off, a_off, w_off, y_off;
    uint n, n_rows;
    float eps;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer A { float a[]; };
layout(set = 0, binding = 2) readonly buffer W { float w[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };

shared float score[STREAMS + 1]; // a local array with a variable index would be in memory

float value_at(uint row, uint stream, uint i) {
    if (stream == STREAMS) return a[a_off + row * n + i];
    return x[x_off + (row * STREAMS + stream) * n + i];
}

void main() {
    const uint row = group_index(), t = gl_LocalInvocationID.x;
    if (row >= n_rows) return;
    float most = -3.0e38;
    for (uint s = 0; s <= STREAMS; ++s) {
        float product = 0.0, squares = 0.0;
        for (uint i = t; i < n; i += LOCAL) {
            const float value = value_at(row, s, i);
            product += value * w[w_off + i];
            squares += value * value;
        }
        product = reduce_sum(product);
        squares = reduce_sum(squares);
        const float of_stream = product / sqrt(squares / float(n) + eps);
        if (t == s % LOCAL) score[s] = of_stream;
        most = max(most, of_stream);
    }
    for (uint s = t; s <= STREAMS; s += LOCAL) score[s] = exp(score[s] - most);
    barrier();
    float sum = 0.0;
    for (uint s = 0; s <= STREAMS; ++s) sum += score[s];
    for (uint i = t; i < n; i += LOCAL) {
        float total = 0.0;
        for (uint s = 0; s <= STREAMS; ++s) total += score[s] * value_at(row, s, i);
        y[y_off + row * n + i] = total / sum;
    }
}
