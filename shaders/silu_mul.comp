#version 450
#extension GL_GOOGLE_include_directive : require
// y = gate * sigmoid(gate) * up
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint gate_off, up_off, y_off;
    uint n;
};
layout(set = 0, binding = 0) readonly buffer Gate { float gate[]; };
layout(set = 0, binding = 1) readonly buffer Up { float up[]; };
layout(set = 0, binding = 2) writeonly buffer Y { float y[]; };

void main() {
    const uint i = global_index();
    if (i >= n) return;
    const float g = gate[gate_off + i];
    y[y_off + i] = g / (1.0 + exp(min(-g, 87.0))) * up[up_off + i]; // exp(88.8) is beyond F32
}
