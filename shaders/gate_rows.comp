#version 450
#extension GL_GOOGLE_include_directive : require
// Multiply each row by its gate: y[r, i] = f(gate[r]) * x[r, i], where f is sigmoid or softplus.
#include "lib/types.glsl"

layout(constant_id = 1) const uint SOFTPLUS = 0;

layout(push_constant) uniform Push {
    uint gate_off, x_off, y_off;
    uint n, n_rows;
};
layout(set = 0, binding = 0) readonly buffer Gate { float gate[]; };
layout(set = 0, binding = 1) readonly buffer X { float x[]; };
layout(set = 0, binding = 2) writeonly buffer Y { float y[]; };

#include "lib/softplus.glsl"

void main() {
    const uint i = global_index();
    if (i >= n * n_rows) return;
    const float g = gate[gate_off + i / n];
    if (SOFTPLUS == 1)
        y[y_off + i] = x[x_off + i] * softplus(g);
    else
        y[y_off + i] = x[x_off + i] / (1.0 + exp(min(-g, 87.0)));
}
