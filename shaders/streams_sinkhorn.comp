#version 450
#extension GL_GOOGLE_include_directive : require
// A row of x has STREAMS streams x_j of n values. Compute y_i = g_i a + sum over j of m_ji x_j with
// g_i = 2 sigmoid(scale[1] mixes[r, STREAMS + i] + base[STREAMS + i]). The rows and columns of m sum to 1
// (Sinkhorn and Knopp 1967; Xie et al. 2025, arXiv:2512.24880). At first, m is the softmax over i of scale[2]
// mixes + base, plus eps. Then columns and rows are divided in turns by their sums plus eps.
#include "lib/types.glsl"

layout(constant_id = 1) const uint STREAMS = 4;

layout(push_constant) uniform Push {
    uint x_off, a_off, mixes_off, scale_off, base_off, y_off;
    uint n, n_rows, n_turns;
    float eps;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer A { float a[]; };
layout(set = 0, binding = 2) readonly buffer Mixes { float mixes[]; };
layout(set = 0, binding = 3) readonly buffer Scale { float scale[]; };
layout(set = 0, binding = 4) readonly buffer Base { float base[]; };
layout(set = 0, binding = 5) writeonly buffer Y { float y[]; };

const uint PAIRS = STREAMS * STREAMS;

shared float m[PAIRS]; // m[j * STREAMS + i]

float mixed(uint row, uint part, uint at) {
    return scale[scale_off + part] * mixes[mixes_off + row * (2 * STREAMS + PAIRS) + at] + base[base_off + at];
}

// Divide element e by the sum of its column (or row) plus eps. All threads take part.
void divide(uint e, bool by_column) {
    float sum = eps;
    [[unroll]] for (uint k = 0; k < STREAMS; ++k) {
        sum += m[by_column ? k * STREAMS + e % STREAMS : e / STREAMS * STREAMS + k];
    }
    const float value = m[e] / sum;
    barrier();
    m[e] = value;
    barrier();
}

void main() {
    const uint row = gl_WorkGroupID.z;
    const uint e = min(gl_LocalInvocationID.x, PAIRS - 1); // surplus threads repeat the last element
    const uint of_row = 2 * STREAMS + e / STREAMS * STREAMS;
    float top = mixed(row, 2, of_row);
    [[unroll]] for (uint k = 1; k < STREAMS; ++k) top = max(top, mixed(row, 2, of_row + k));
    float sum = 0.0;
    [[unroll]] for (uint k = 0; k < STREAMS; ++k) sum += exp(mixed(row, 2, of_row + k) - top);
    m[e] = exp(mixed(row, 2, 2 * STREAMS + e) - top) / sum + eps;
    barrier();
    divide(e, true);
    for (uint turn = 1; turn < n_turns; ++turn) {
        divide(e, false);
        divide(e, true);
    }
    const uint at = gl_WorkGroupID.x * LOCAL + gl_LocalInvocationID.x;
    if (at >= n) return;
    const uint first = row * STREAMS * n + at;
    const float value = a[a_off + row * n + at];
    float own[STREAMS];
    [[unroll]] for (uint j = 0; j < STREAMS; ++j) own[j] = x[x_off + first + j * n];
    [[unroll]] for (uint i = 0; i < STREAMS; ++i) {
        float total = 2.0 / (1.0 + exp(min(-mixed(row, 1, STREAMS + i), 87.0))) * value;
        [[unroll]] for (uint j = 0; j < STREAMS; ++j) total += m[j * STREAMS + i] * own[j];
        y[y_off + first + i * n] = total;
    }
}
