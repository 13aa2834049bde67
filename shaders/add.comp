#version 450
#extension GL_GOOGLE_include_directive : require
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint a_off, b_off, y_off;
    uint n;
};
layout(set = 0, binding = 0) readonly buffer A { float a[]; };
layout(set = 0, binding = 1) readonly buffer B { float b[]; };
layout(set = 0, binding = 2) writeonly buffer Y { float y[]; };

void main() {
    const uint i = global_index();
    if (i < n) y[y_off + i] = a[a_off + i] + b[b_off + i];
}
