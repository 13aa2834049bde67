#version 450
#extension GL_GOOGLE_include_directive : require
// A row has STREAMS streams x_i and the stream a. A stream's score is w . s / rms(s). Write the sum of the
// streams, weighted by the softmax of their scores.
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

float value_at(uint row, uint stream, uint i) {
    if (stream == STREAMS) return a[a_off + row * n + i];
    return x[x_off + (row * STREAMS + stream) * n + i];
}

void main() {
    const uint row = group_index();
    if (row >= n_rows) return;
    float score[STREAMS + 1];
    float most = -3.0e38;
    for (uint s = 0; s <= STREAMS; ++s) {
        float product = 0.0, squares = 0.0;
        for (uint i = gl_LocalInvocationID.x; i < n; i += LOCAL) {
            const float value = value_at(row, s, i);
            product += value * w[w_off + i];
            squares += value * value;
        }
        product = reduce_sum(product);
        squares = reduce_sum(squares);
        score[s] = product / sqrt(squares / float(n) + eps);
        most = max(most, score[s]);
    }
    float sum = 0.0;
    for (uint s = 0; s <= STREAMS; ++s) {
        score[s] = exp(score[s] - most);
        sum += score[s];
    }
    for (uint i = gl_LocalInvocationID.x; i < n; i += LOCAL) {
        float total = 0.0;
        for (uint s = 0; s <= STREAMS; ++s) total += score[s] * value_at(row, s, i);
        y[y_off + row * n + i] = total / sum;
    }
}
