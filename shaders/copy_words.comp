#version 450
#extension GL_GOOGLE_include_directive : require
// Copy n words from src to dst.
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint src_off, dst_off;
    uint n;
};
layout(set = 0, binding = 0) readonly buffer Src { uint src[]; };
layout(set = 0, binding = 1) writeonly buffer Dst { uint dst[]; };

void main() {
    const uint stride = LOCAL * gl_NumWorkGroups.x;
    for (uint i = gl_GlobalInvocationID.x; i < n; i += stride) dst[dst_off + i] = src[src_off + i];
}
