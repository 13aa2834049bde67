#version 450
#extension GL_GOOGLE_include_directive : require
// Convert x to 8 bits, in blocks of 32 (lib/quantize.glsl).
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint x_off, y_off;
    uint k, n_rows;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) writeonly buffer Y { uint y[]; };
#define Q8_QUADS 1
#include "lib/quantize.glsl"

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint n_blocks = n_rows * (k / 32);
    const uint block = group_index() * (LOCAL / 8) + thread / 8;
    const uint own = min(block, n_blocks - 1);
    const uint at = x_off + 32 * own + 4 * (thread % 8);
    const vec4 value[1] = vec4[](vec4(x[at], x[at + 1], x[at + 2], x[at + 3]));
    const uint i = own % (k / 32) * 32 + 4 * (thread % 8);
    put_q8(value, y_off + own / (k / 32) * q8_row_words(k), k, i, block < n_blocks ? k : 0);
}
