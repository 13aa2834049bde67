#version 450
#extension GL_GOOGLE_include_directive : require
// Convert x to bfloat16. A word holds two values, the first in the low 16 bits. With an odd number of values,
// the last word ends with zeros.
#include "lib/types.glsl"
#include "lib/bf16.glsl"

layout(push_constant) uniform Push {
    uint x_off, y_off;
    uint n;
};
layout(set = 0, binding = 0) readonly buffer X { uint x[]; }; // bits of floats
layout(set = 0, binding = 1) writeonly buffer Y { uint y[]; };

void main() {
    const uint word = global_index();
    const uint i = 2 * word;
    if (i >= n) return;
    const uint high = i + 1 < n ? bf16_bits(x[x_off + i + 1]) : 0u;
    y[y_off + word] = bf16_bits(x[x_off + i]) | (high << 16);
}
