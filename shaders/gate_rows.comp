#version 450
#extension GL_GOOGLE_include_directive : require
// Apply a gate per row: y[r, i] = sigmoid(gate[r]) * x[r, i].
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint gate_off, x_off, y_off;
    uint n, n_rows;
};
layout(set = 0, binding = 0) readonly buffer Gate { float gate[]; };
layout(set = 0, binding = 1) readonly buffer X { float x[]; };
layout(set = 0, binding = 2) writeonly buffer Y { float y[]; };

void main() {
    const uint i = global_index();
    if (i < n * n_rows) y[y_off + i] = x[x_off + i] / (1.0 + exp(min(-gate[gate_off + i / n], 87.0)));
}
