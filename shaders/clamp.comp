#version 450
#extension GL_GOOGLE_include_directive : require
// Compute y = min(max(x, low), high).
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint x_off, y_off;
    uint n;
    float low, high;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) writeonly buffer Y { float y[]; };

void main() {
    const uint i = global_index();
    if (i < n) y[y_off + i] = min(max(x[x_off + i], low), high);
}
