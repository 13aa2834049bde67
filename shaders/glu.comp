#version 450
#extension GL_GOOGLE_include_directive : require
// Compute y = act(gate) * up.
#include "lib/types.glsl"

layout(constant_id = 1) const uint ACT = 1;

layout(push_constant) uniform Push {
    uint gate_off, up_off, y_off;
    uint n;
};
layout(set = 0, binding = 0) readonly buffer Gate { float gate[]; };
layout(set = 0, binding = 1) readonly buffer Up { float up[]; };
layout(set = 0, binding = 2) writeonly buffer Y { float y[]; };

#include "lib/glu.glsl"

void main() {
    const uint i = global_index();
    if (i < n) y[y_off + i] = glu_value(ACT, gate[gate_off + i], up[up_off + i]);
}
