#version 450
#extension GL_GOOGLE_include_directive : require
// Compute y = c * tanh(x / c).
#include "lib/types.glsl"
#include "lib/tanh.glsl"

layout(push_constant) uniform Push {
    uint x_off, y_off;
    uint n;
    float c;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) writeonly buffer Y { float y[]; };

void main() {
    const uint i = global_index();
    if (i < n) y[y_off + i] = soft_cap(x[x_off + i], c);
}
