#version 450
#extension GL_GOOGLE_include_directive : require
// Multiply by a factor: y = c * x. If c is 0, y is 0 even for NaN, because x may be uninitialised.
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint x_off, y_off;
    uint n;
    float c;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) writeonly buffer Y { float y[]; };

void main() {
    const uint i = global_index();
    if (i < n) y[y_off + i] = c == 0.0 ? 0.0 : c * x[x_off + i];
}
